"""Computes a micro-batch's log-probs and its share of the update's loss, on any backend.

    packed rows -> hidden states -> log-probs of the tokens that are trained (and only
    those: the LM head is never run for the others) -> the terms of the loss

The loss is found by its name (`algorithms/losses.py`), and gets the columns that its entry names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from homeostat.algorithms.losses import EntropyNeed, loss_of
from homeostat.algorithms.terms import LossInputs, LossTerms
from homeostat.arrays import FloatArray, IntArray
from homeostat.columns import KEPT_IDS, TRUTH, Ragged, dense
from homeostat.config.trainer import TrainerConfig
from homeostat.expert_load import RouterLoss
from homeostat.models.build import Model
from homeostat.models.decoder import Decoder
from homeostat.models.expert_load import LoadWatch
from homeostat.models.hidden_states import HiddenStates
from homeostat.models.lora import lora_modules
from homeostat.models.routing import Routing
from homeostat.models.value_head import value_weight, values
from homeostat.ops.attention import PackedLayout
from homeostat.ops.branches import Branches
from homeostat.ops.dropout import dropout_keys
from homeostat.ops.kept_sets import KeptSets
from homeostat.ops.logprobs import token_logprobs, token_logprobs_and_entropy
from homeostat.ops.sharing import SharedPrompts
from homeostat.train.hidden import Hidden, of_all_tokens
from homeostat.train.reducers import REDUCERS, TokenPlaces
from homeostat.train.replay import replay_sums, replayed_columns, replaying
from homeostat.train.runtime import Runtime
from homeostat.train.sequence.hidden import PartHidden, WholePass, part_hidden
from homeostat.train.sequence.links import SequenceLinks
from homeostat.types import Computed, LossSpec, Outputs, TrainBatch


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probs of the M trained tokens of a batch, and entropies of their distributions.

    A model with a value head returns values instead: `value_M` of the states in which these tokens
    were chosen, `value_B` at the last token of each row. `index_M` is a token's place in the batch,
    `row_of_M` its row. `routing` is that of the pass where it replayed recorded routes: its
    `finish_backward` follows the backward pass.
    """

    logp_M: Tensor | None
    entropy_M: Tensor | None
    index_M: Tensor
    row_of_M: Tensor
    value_M: Tensor | None = None
    value_B: Tensor | None = None
    routing: Routing | None = None
    # From a sum over tokens that this rank computed to that over all of the batch.
    total: Callable[[Tensor], Tensor] = lambda value: value

    @property
    def head_M(self) -> Tensor:
        """Return the head's output for each trained token: its log-prob, or its value."""
        found = self.value_M if self.logp_M is None else self.logp_M
        assert found is not None, "a model has one head or the other"
        return found


@dataclass(frozen=True, slots=True)
class OnDevice:
    """The outputs of a forward pass over one batch, before they are copied to the host."""

    scores: TokenScores | None
    hidden: dict[int, Tensor]
    load_LE: Tensor | None = None

    def to_host(self, outputs: Outputs) -> Computed:
        scores = self.scores
        return Computed(
            logp_M=_host(scores.logp_M) if scores is not None and outputs.logp else None,
            entropy_M=None if scores is None else _host(scores.entropy_M),
            value_M=None if scores is None else _host(scores.value_M),
            value_B=None if scores is None else _host(scores.value_B),
            hidden={layer: reduced.float().cpu().numpy() for layer, reduced in self.hidden.items()},
            load_LE=_host(self.load_LE),
        )


@dataclass(frozen=True, slots=True)
class Forward:
    """Computes micro-batches with a role's model. `has_dropout`: its adapter has dropout.

    `links` lead to the ranks that share this rank's micro-batches; None if it has them alone.
    """

    config: TrainerConfig
    runtime: Runtime
    seed: int
    has_dropout: bool
    links: SequenceLinks | None = None

    @classmethod
    def of(
        cls,
        model: Model,
        config: TrainerConfig,
        *,
        runtime: Runtime,
        seed: int,
        links: SequenceLinks | None = None,
    ) -> Forward:
        has_dropout = any(module.rate > 0 for _, module in lora_modules(model))
        return cls(config, runtime, seed, has_dropout, links)

    def outputs(self, model: Model, batch: TrainBatch, outputs: Outputs) -> OnDevice:
        """Compute only the requested outputs. There is no dropout."""
        states = HiddenStates(outputs.hidden) if outputs.hidden else None
        watch = self._watch(model, batch, None) if outputs.load else None
        tokens_N = self._send(batch.tokens_N)
        routing, routes = self._routing(model, batch, watch)
        hidden = self._hidden(model, batch, tokens_N, routing, alike=routes, states=states)
        load_LE = None if watch is None else hidden.total(watch.load())
        scores = None
        if outputs.logp or outputs.entropy or outputs.value:
            entropy = EntropyNeed.VALUE if outputs.entropy else EntropyNeed.NONE
            scores = self._scores(
                model, batch, tokens_N, hidden, temperature=outputs.temperature, entropy=entropy
            )
        if states is None:
            return OnDevice(scores, {}, load_LE)
        reduce, places = REDUCERS[outputs.reducer], self._places(batch, hidden)
        found = states.found().items()
        reduced = {layer: hidden.reduced(reduce, state, places) for layer, state in found}
        return OnDevice(scores, reduced, load_LE)

    def scores(
        self,
        model: Model,
        batch: TrainBatch,
        *,
        temperature: float,
        entropy: EntropyNeed = EntropyNeed.NONE,
        dropout_step: int | None = None,
        watch: LoadWatch | None = None,
    ) -> TokenScores:
        """Compute the head's outputs for the trained tokens, with a gradient.

        `dropout_step` is the key of dropout.
        """
        tokens_N = self._send(batch.tokens_N)
        routing, routes = self._routing(model, batch, watch)
        hidden = self._hidden(
            model, batch, tokens_N, routing, alike=routes, dropout_step=dropout_step
        )
        scores = self._scores(
            model, batch, tokens_N, hidden, temperature=temperature, entropy=entropy
        )
        return replace(scores, routing=routing, total=hidden.total)

    def loss(
        self, model: Model, batch: TrainBatch, spec: LossSpec, *, step: int
    ) -> tuple[TokenScores, LossTerms, Tensor | None]:
        """Compute the batch's part of the loss of update `step`, which is the key of dropout.

        The third value is the load of the model's experts. The routers' losses are not in the
        terms: their gradients join in the backward pass (ops/balance.py).
        """
        loss = loss_of(spec)
        watch = self._watch(model, batch, spec.router)
        scores = self.scores(
            model,
            batch,
            temperature=float(spec.params.get("temperature", 1.0)),
            entropy=loss.entropy(spec),
            dropout_step=step,
            watch=watch,
        )
        read = {name: dense(v) for name, v in batch.columns.items() if name in loss.columns}
        inputs = LossInputs(
            logp_M=scores.logp_M,
            entropy_M=scores.entropy_M,
            weights_M=self._send(batch.weights_N)[scores.index_M],
            columns_M={name: self._send(v)[scores.index_M] for name, v in read.items()},
            row_of_M=scores.row_of_M,
            num_rows=batch.num_rows,
            value_M=scores.value_M,
            value_B=scores.value_B,
        )
        terms, routing = loss.terms(inputs, spec), scores.routing
        if routing is not None and routing.replayed_NLK is not None:
            replayed = replay_sums(routing, batch, total=scores.total)
            terms = replace(terms, sums={**terms.sums, **replayed})
        return scores, terms, None if watch is None else scores.total(watch.found())

    def _routing(
        self, model: Model, batch: TrainBatch, watch: LoadWatch | None
    ) -> tuple[Routing | None, tuple[np.ndarray, ...]]:
        """Return the routing that replays the batch's recorded routes and counts the load, and
        those routes.

        The routing is None if there is nothing to replay and nothing to count.
        """
        routes = replayed_columns(batch)
        routing = replaying(routes, batch, model.moe, send=self._send) if routes else None
        if watch is not None:
            routing = routing or Routing()
            routing.load = watch
        return routing, tuple(routes.values())

    def _hidden(
        self,
        model: Model,
        batch: TrainBatch,
        tokens_N: Tensor,
        routing: Routing | None,
        *,
        alike: Sequence[np.ndarray],
        dropout_step: int | None = None,
        states: HiddenStates | None = None,
    ) -> Hidden | PartHidden:
        """Return the hidden states. `alike`: rows share a prompt only where these are equal."""
        positions_N = self._send(batch.positions_N)
        layout = PackedLayout.of(batch.lengths_B.tolist(), device=self.runtime.device)
        keys_N = self._dropout_keys(batch, positions_N, dropout_step)
        if not isinstance(model, Decoder):
            assert routing is None, "refused by config/combinations"
            how = {"dropout_keys_N": keys_N, "states": states}
            return Hidden(model.hidden(tokens_N, positions_N, layout, **how), self._send)
        # Sharing computes a prompt once for all its rows, so that an expert's room is not taken by
        # copies.
        watch = None if routing is None else routing.load
        shares = keys_N is None and (watch is None or not watch.has_limit)
        sharing = self._sharing(model, batch, alike) if shares else None
        inputs = (tokens_N, positions_N)
        how = {"dropout_keys_N": keys_N, "sharing": sharing, "states": states, "routing": routing}
        if self.links is None:
            hidden = of_all_tokens(model.hidden(*inputs, layout, **how), self._send, sharing)
        else:
            whole = WholePass(*inputs, lengths_B=batch.lengths_B, **how)
            hidden = part_hidden(model, self.links, whole, send=self._send)
        if routing is not None and model.moe is not None:
            routing.finish_pass(len(model.moe.layers))
        return hidden

    def _scores(
        self,
        model: Model,
        batch: TrainBatch,
        tokens_N: Tensor,
        hidden: Hidden | PartHidden,
        *,
        temperature: float,
        entropy: EntropyNeed,
    ) -> TokenScores:
        index, row_of = predicted_positions(batch)
        index_M, row_of_M = self._send(index), self._send(row_of)
        head_1D = value_weight(model)
        if head_1D is not None:
            places = (index - 1, np.cumsum(batch.lengths_B) - 1)
            value_M, value_B = (_values(hidden, head_1D, place) for place in places)
            return TokenScores(None, None, index_M, row_of_M, value_M, value_B)
        weight_VD, found = model.output_weight(), []
        for chosen, heat in self._by_temperature(batch, index, temperature):
            mine = hidden.mine(chosen - 1) + 1
            how = {"temperature": heat, "model": model, "entropy": entropy}
            if self.links is not None and not len(mine):
                # The head takes part all the same, with a gradient of zero: ranks reduce it.
                inputs = (hidden.state_XD[:1], weight_VD, tokens_N[:1])
                parts = self._logprobs(inputs, kept=None, **how)
                found.append((mine, *(None if part is None else part[:0] for part in parts)))
                continue
            inputs = (hidden.at(mine - 1), weight_VD, tokens_N[self._send(mine)])
            kept = self._kept(batch, mine, vocabulary=weight_VD.shape[0])
            found.append((mine, *self._logprobs(inputs, kept=kept, **how)))
        of, logp, entropies = zip(*found, strict=True)
        of_M = np.concatenate(of)
        entropy_M = None
        if entropy is not EntropyNeed.NONE:
            entropy_M = hidden.whole(torch.cat(entropies), of_M, index)
        return TokenScores(hidden.whole(torch.cat(logp), of_M, index), entropy_M, index_M, row_of_M)

    def _by_temperature(
        self, batch: TrainBatch, index_M: IntArray, temperature: float
    ) -> list[tuple[IntArray, float]]:
        """Return the places of the trained tokens by the temperature that they are scored at.

        It is that of sampling, except for tokens of the truth, which nobody sampled.
        """
        if TRUTH not in batch.columns or temperature == 1.0:
            return [(index_M, temperature)]
        is_truth_M = dense(batch.columns[TRUTH])[index_M] > 0
        parts = [(index_M[~is_truth_M], temperature), (index_M[is_truth_M], 1.0)]
        return [(chosen, heat) for chosen, heat in parts if len(chosen)]

    def _logprobs(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        *,
        temperature: float,
        kept: KeptSets | None,
        model: Model,
        entropy: EntropyNeed,
    ) -> tuple[Tensor, Tensor | None]:
        how = {
            "temperature": temperature,
            "chunk_bytes": self.config.logits_bytes(self.runtime.device.type),
            "numerics": model.numerics,
            "kept": kept,
            "soft_cap": model.logit_cap,
        }
        if entropy is EntropyNeed.NONE:
            return token_logprobs(*inputs, **how), None
        with_grad = entropy is EntropyNeed.GRAD
        return token_logprobs_and_entropy(*inputs, **how, entropy_grad=with_grad)

    def _kept(self, batch: TrainBatch, index_M: IntArray, *, vocabulary: int) -> KeptSets | None:
        """Return the sets that these tokens were drawn from; None where nothing was cut."""
        column = batch.columns.get(KEPT_IDS)
        if column is None:
            return None
        assert isinstance(column, Ragged), "columns.py declares it ragged"
        return KeptSets.of(column, batch.tokens_N, index_M, vocabulary=vocabulary, send=self._send)

    def _watch(self, model: Model, batch: TrainBatch, loss: RouterLoss | None) -> LoadWatch | None:
        if model.moe is None:
            return None
        return LoadWatch.of(model.moe, batch.lengths_B, loss=loss, device=self.runtime.device)

    def _places(self, batch: TrainBatch, hidden: Hidden | PartHidden) -> TokenPlaces:
        index_M, row_of_M, lengths_B = map(
            self._send, (*predicted_positions(batch), batch.lengths_B)
        )
        return TokenPlaces(index_M, row_of_M, lengths_B, hidden.state_places(batch.num_tokens))

    def _sharing(
        self, model: Decoder, batch: TrainBatch, alike: Sequence[np.ndarray]
    ) -> SharedPrompts | Branches | None:
        if not self.config.shares_prompts or batch.num_rows < 2:
            return None
        of_rows = (batch.tokens_N, batch.lengths_B, prompt_lengths(batch))
        how = {"device": self.runtime.device, "alike": alike}
        branches = Branches.find(*of_rows, **how) if model.numerics == "fast" else None
        return branches or SharedPrompts.find(*of_rows, **how)

    def _dropout_keys(
        self, batch: TrainBatch, positions_N: Tensor, step: int | None
    ) -> Tensor | None:
        if step is None or not self.has_dropout:
            return None
        row_ids_N = self._send(np.repeat(batch.row_ids_B, batch.lengths_B))
        return dropout_keys(row_ids_N, positions_N, seed=self.seed, step=step)

    def _send(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.runtime.pin_memory:
            tensor = tensor.pin_memory()
        return tensor.to(self.runtime.device, non_blocking=self.runtime.pin_memory)


def _values(hidden: Hidden | PartHidden, head_1D: Tensor, place: IntArray) -> Tensor:
    """Return the values of the states of tokens."""
    mine = hidden.mine(place)
    return hidden.whole(values(hidden.at(mine), head_1D), mine, place)


def predicted_positions(batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the trained tokens, and the row each belongs to."""
    index_M = np.flatnonzero(batch.weights_N)
    row_of_N = np.repeat(np.arange(batch.num_rows), batch.lengths_B)
    return index_M, row_of_N[index_M]


def prompt_lengths(batch: TrainBatch) -> np.ndarray:
    """Per row, the tokens before the first trained one."""
    starts_B = np.cumsum(batch.lengths_B) - batch.lengths_B
    trained_N = np.flatnonzero(batch.weights_N)
    first = np.searchsorted(trained_N, starts_B)
    ends_B = np.append(trained_N, batch.num_tokens)[first]
    return np.minimum(ends_B - starts_B, batch.lengths_B)


def _host(tensor: Tensor | None) -> FloatArray | None:
    return None if tensor is None else tensor.float().cpu().numpy()
