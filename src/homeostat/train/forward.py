"""From a micro-batch to its log-probs and its share of the update's loss, on any backend.

    packed rows -> hidden states -> log-probs of the tokens that are trained (and only
    those: the LM head is never run for the others) -> the terms of the loss

The loss is found by its name (`algorithms/losses.py`), and gets the columns that its entry names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from homeostat.algorithms.losses import EntropyNeed, LossInputs, loss_of
from homeostat.algorithms.terms import LossTerms
from homeostat.columns import dense
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
from homeostat.ops.dropout import dropout_keys
from homeostat.ops.logprobs import token_logprobs, token_logprobs_and_entropy
from homeostat.ops.sharing import SharedPrompts
from homeostat.train.reducers import REDUCERS, TokenPlaces
from homeostat.train.replay import replay_sums, replayed_columns, replaying
from homeostat.train.runtime import Runtime
from homeostat.types import Computed, FloatArray, LossSpec, Outputs, TrainBatch


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probs of the M trained tokens of a batch, and entropies of their distributions.

    A model with a value head gives values instead: `value_M` of the states in which these tokens
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

    @property
    def head_M(self) -> Tensor:
        """What the model's head gives for each trained token: its log-prob, or its value."""
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
    """Computes micro-batches with a role's model. `has_dropout`: its adapter has dropout."""

    config: TrainerConfig
    runtime: Runtime
    seed: int
    has_dropout: bool

    @classmethod
    def of(cls, model: Model, config: TrainerConfig, *, runtime: Runtime, seed: int) -> Forward:
        has_dropout = any(module.rate > 0 for _, module in lora_modules(model))
        return cls(config, runtime, seed, has_dropout)

    def outputs(self, model: Model, batch: TrainBatch, outputs: Outputs) -> OnDevice:
        """Compute what is asked for, and no more. There is no dropout."""
        states = HiddenStates(outputs.hidden) if outputs.hidden else None
        watch = self._watch(model, batch, None) if outputs.load else None
        tokens_N = self._send(batch.tokens_N)
        routing, routes = self._routing(model, batch, watch)
        hidden_ND = self._hidden(model, batch, tokens_N, routing, alike=routes, states=states)
        load_LE = None if watch is None else watch.load()
        scores = None
        if outputs.logp or outputs.entropy or outputs.value:
            entropy = EntropyNeed.VALUE if outputs.entropy else EntropyNeed.NONE
            scores = self._scores(
                model, batch, tokens_N, hidden_ND, temperature=outputs.temperature, entropy=entropy
            )
        if states is None:
            return OnDevice(scores, {}, load_LE)
        reduce, places = REDUCERS[outputs.reducer], self._places(batch)
        reduced = {layer: reduce(state, places) for layer, state in states.found().items()}
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
        """Compute what the head gives for the trained tokens, with a gradient.

        `dropout_step` keys dropout.
        """
        tokens_N = self._send(batch.tokens_N)
        routing, routes = self._routing(model, batch, watch)
        hidden_ND = self._hidden(
            model, batch, tokens_N, routing, alike=routes, dropout_step=dropout_step
        )
        scores = self._scores(
            model, batch, tokens_N, hidden_ND, temperature=temperature, entropy=entropy
        )
        return replace(scores, routing=routing)

    def loss(
        self, model: Model, batch: TrainBatch, spec: LossSpec, *, step: int
    ) -> tuple[TokenScores, LossTerms, Tensor | None]:
        """Compute what the batch adds to the loss of update `step`, which keys dropout.

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
            terms = replace(terms, sums={**terms.sums, **replay_sums(routing, batch)})
        return scores, terms, None if watch is None else watch.found()

    def _routing(
        self, model: Model, batch: TrainBatch, watch: LoadWatch | None
    ) -> tuple[Routing | None, tuple[np.ndarray, ...]]:
        """Return what replays the batch's recorded routes and watches the load, and those routes.

        None if there is nothing to replay and nothing to watch.
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
    ) -> Tensor:
        """Return the hidden states. `alike`: rows share a prompt only where these are equal."""
        positions_N = self._send(batch.positions_N)
        layout = PackedLayout.of(batch.lengths_B.tolist(), device=self.runtime.device)
        keys_N = self._dropout_keys(batch, positions_N, dropout_step)
        if not isinstance(model, Decoder):
            assert routing is None, "refused by config.combinations"
            return model.hidden(tokens_N, positions_N, layout, dropout_keys_N=keys_N, states=states)
        # Sharing computes a prompt once for all its rows: then there is no state of every token,
        # and an expert's room is not taken by copies.
        watch = None if routing is None else routing.load
        shares = keys_N is None and states is None and (watch is None or not watch.has_limit)
        sharing = self._sharing(batch, alike) if shares else None
        hidden_ND = model.hidden(
            tokens_N,
            positions_N,
            layout,
            dropout_keys_N=keys_N,
            sharing=sharing,
            states=states,
            routing=routing,
        )
        if routing is not None and model.moe is not None:
            routing.finish_pass(len(model.moe.layers))
        return hidden_ND

    def _scores(
        self,
        model: Model,
        batch: TrainBatch,
        tokens_N: Tensor,
        hidden_ND: Tensor,
        *,
        temperature: float,
        entropy: EntropyNeed,
    ) -> TokenScores:
        index_M, row_of_M = map(self._send, predicted_positions(batch))
        head_1D = value_weight(model)
        if head_1D is not None:
            last_B = self._send(np.cumsum(batch.lengths_B) - 1)
            value_M, value_B = (values(hidden_ND[i], head_1D) for i in (index_M - 1, last_B))
            return TokenScores(None, None, index_M, row_of_M, value_M, value_B)
        inputs = (hidden_ND[index_M - 1], model.output_weight(), tokens_N[index_M])
        how = {
            "temperature": temperature,
            "chunk_bytes": self.config.logits_bytes(self.runtime.device.type),
            "numerics": model.numerics,
        }
        if entropy is EntropyNeed.NONE:
            logp_M, entropy_M = token_logprobs(*inputs, **how), None
        else:
            with_grad = entropy is EntropyNeed.GRAD
            logp_M, entropy_M = token_logprobs_and_entropy(*inputs, **how, entropy_grad=with_grad)
        return TokenScores(logp_M, entropy_M, index_M, row_of_M)

    def _watch(self, model: Model, batch: TrainBatch, loss: RouterLoss | None) -> LoadWatch | None:
        if model.moe is None:
            return None
        return LoadWatch.of(model.moe, batch.lengths_B, loss=loss, device=self.runtime.device)

    def _places(self, batch: TrainBatch) -> TokenPlaces:
        arrays = (*predicted_positions(batch), batch.lengths_B)
        return TokenPlaces(*map(self._send, arrays))

    def _sharing(self, batch: TrainBatch, alike: Sequence[np.ndarray]) -> SharedPrompts | None:
        if not self.config.share_prompts or batch.num_rows < 2:
            return None
        device = self.runtime.device
        lengths_B = prompt_lengths(batch)
        return SharedPrompts.find(
            batch.tokens_N, batch.lengths_B, lengths_B, device=device, alike=alike
        )

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
