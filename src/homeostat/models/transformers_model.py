"""Any causal LM that transformers can build, behind the native decoder's interface.

    tokens_N -> [1, N] with positions that restart -> transformers' base model -> hidden_ND

Invariant: exactly the model is trained. This is probed at load time on random tokens. Logits must
be a plain product of hidden state and output weight; otherwise the model is refused, because the
log-prob function would train another model. Packed documents must not attend to each other;
otherwise rows are run one at a time, which is right but slower. A model with its own dropout is
refused: it draws from the global generator, so a step would depend on how it is split. No code from
the checkpoint is ever run.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn

from homeostat.errors import ModelError
from homeostat.models.families import decoder_config, require_usual_sizes
from homeostat.models.hf import config_origin, read_config, weight_files
from homeostat.models.hidden_states import HiddenStates
from homeostat.models.routing import Routing
from homeostat.models.transformers_attention import (
    AttentionSwitch,
    CacheShape,
    Recorder,
    foreseen_shape,
    refused_values,
)
from homeostat.ops.attention import AttentionContext, PackedAttention, PackedLayout
from homeostat.ops.dropout import DropoutKeys
from homeostat.ops.linear import Numerics
from homeostat.ops.moe_shape import MoeShape

# Exceptions that transformers has been seen to raise over the content of a config.json.
_VENDOR_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    ImportError,
    AssertionError,
    StrictDataclassError,
)
_PROBE_LENGTHS = (5, 3, 4)
# Far above the range of any soft cap.
_PROBE_LOGIT = 1000.0


class TransformersModel(nn.Module):
    """A model of transformers; the parameter names of `causal_lm` are the HF names."""

    # config/combinations has already refused all others.
    numerics: Numerics = "fast"
    # Its routers are transformers' own: nothing is recorded, replayed or balanced.
    moe: MoeShape | None = None
    # A model with a cap is refused.
    logit_cap: float | None = None

    def __init__(self, causal_lm: nn.Module, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.hub_experts = _hub_experts(causal_lm)
        self.dropout_keys = DropoutKeys()
        self.takes_positions = (
            "position_ids" in inspect.signature(_trunk(causal_lm).forward).parameters
        )
        self.packs = False
        self._switch: AttentionSwitch | None = None
        self._cache_shape: CacheShape | None = None
        if gradient_checkpointing:
            self._enable_checkpointing()

    def output_weight(self) -> Tensor:
        """Return [V, D]: logits would be hidden @ output_weight.T."""
        return self.causal_lm.get_output_embeddings().weight

    def hidden(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        layout: PackedLayout,
        *,
        dropout_keys_N: Tensor | None = None,
        states: HiddenStates | None = None,
    ) -> Tensor:
        """Return [N, D] after the final norm. Without dropout keys there is no dropout.

        `states` collects the hidden states of layers.
        """
        # A model that cannot pack runs one document at a time: slower, but right.
        sizes = [tokens_N.shape[0]] if self.packs else list(layout.lengths)
        keys = [None] * len(sizes) if dropout_keys_N is None else dropout_keys_N.split(sizes)
        parts = zip(tokens_N.split(sizes), positions_N.split(sizes), keys, strict=True)
        return torch.cat([self._run(*part, states) for part in parts])

    @property
    def config(self) -> CacheShape:
        """Return the sizes that an engine needs; known after `prepare_sampling`."""
        assert self._cache_shape is not None, "the engine prepares it"
        return self._cache_shape

    @property
    def foreseen(self) -> CacheShape | None:
        """Return the sizes that an engine will need, by the words of the model's config."""
        config = self.causal_lm.config.get_text_config()
        return foreseen_shape(config, vocab_size=self.output_weight().shape[0])

    def hidden_in(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        attention: AttentionContext,
        *,
        routing: Routing | None = None,
    ) -> Tensor:
        """Return [N, D] after the final norm, in the context of tokens computed before."""
        del routing
        assert self._switch is not None, "the engine prepares it"
        with self._switch.through(attention):
            return self._run(tokens_N, positions_N, None)

    @torch.no_grad()
    def prepare_sampling(self) -> None:
        """Let an engine sample with the model. Refuse one that would compute something else."""
        if not self.takes_positions:
            raise ModelError(
                f"model.path: {type(self.causal_lm).__name__} of transformers takes no positions, "
                "so that the engine cannot say where a token is. Use engine.type=vllm."
            )
        was_training = self.training
        self.eval()
        self._switch = AttentionSwitch(self.causal_lm)
        layout = PackedLayout.of(_PROBE_LENGTHS, self.output_weight().device)
        tokens_N, positions_N = self._probe_rows(layout)
        recorder = Recorder(PackedAttention(layout, "sdpa"))
        found = self.hidden_in(tokens_N, positions_N, recorder)
        config = self.causal_lm.config.get_text_config()
        self._cache_shape = recorder.shape(config, vocab_size=self.output_weight().shape[0])
        rows = zip(*(x.split(_PROBE_LENGTHS) for x in (tokens_N, positions_N)), strict=True)
        if not _close(found, torch.cat([self._run(*row, None) for row in rows])):
            raise refused_values()
        self.train(was_training)

    def probe(self) -> None:
        """Refuse a model that cannot be trained exactly; find out whether it supports packing."""
        was_training = self.training
        try:
            with torch.no_grad():
                # Dropout only shows in training mode; the other probes need evaluation mode.
                _refuse_dropout(self.train().causal_lm)
                _probe_logits(self.eval().causal_lm)
                _refuse_later_tokens(self.causal_lm)
                self.packs = self.takes_positions and self._packs()
        # A RuntimeError like those of vendors, but one that the user can act on.
        except torch.OutOfMemoryError:
            raise
        except _VENDOR_ERRORS as error:
            if isinstance(error, ModelError):
                raise
            raise ModelError(
                f"model.path: transformers built {type(self.causal_lm).__name__}, which cannot run "
                f"({error}): the sizes in config.json do not go together."
            ) from error
        self.train(was_training)

    def _run(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        keys_T: Tensor | None,
        states: HiddenStates | None = None,
    ) -> Tensor:
        how = {"position_ids": positions_T[None]} if self.takes_positions else {}
        if states is not None:
            how["output_hidden_states"] = True
        with self.dropout_keys.use(keys_T):
            outputs = _trunk(self.causal_lm)(input_ids=tokens_T[None], use_cache=False, **how)
        if states is not None:
            for layer, state in enumerate(outputs.hidden_states):
                states.add(layer, state[0])
        return outputs.last_hidden_state[0]

    def _packs(self) -> bool:
        layout = PackedLayout.of(_PROBE_LENGTHS, self.output_weight().device)
        tokens_N, positions_N = self._probe_rows(layout)
        # `packs` is still False here, so this runs the documents one by one.
        separate = self.hidden(tokens_N, positions_N, layout)
        together = self._run(tokens_N, positions_N, None)
        return _close(together, separate)

    def _probe_rows(self, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        """Return random tokens of a few documents, and their positions."""
        positions_N = torch.cat([torch.arange(length) for length in layout.lengths])
        tokens_N = _probe_tokens(self.causal_lm, layout.num_tokens)
        return tokens_N, positions_N.to(tokens_N.device)

    def _enable_checkpointing(self) -> None:
        if not getattr(self.causal_lm, "supports_gradient_checkpointing", False):
            raise ModelError(
                f"trainer.gradient_checkpointing: {type(self.causal_lm).__name__} of transformers "
                "does not support it. Set it to false."
            )
        contexts = self.dropout_keys.checkpoint_contexts
        self.causal_lm.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": contexts}
        )


def load_transformers(
    folder: Path, *, attention: str, dtype: torch.dtype, init: str, seed: int
) -> nn.Module:
    """Load the causal LM on the CPU, from its safetensors or drawn from the seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    assert attention != "varlen", "refused by config/combinations"
    wanted = {"dtype": dtype, "trust_remote_code": False}
    if attention != "auto":
        wanted["attn_implementation"] = attention
    try:
        if init == "random":
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            # Drawing weights must not advance the global generator of the run.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return AutoModelForCausalLM.from_config(config, **wanted)
        # Raises our own message if there are only pickled weights, before transformers looks.
        weight_files(folder)
        causal_lm, report = AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, output_loading_info=True, **wanted
        )
    except (*_VENDOR_ERRORS, SafetensorError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"model.path: transformers cannot load {folder}: {error}") from error
    _refuse_gaps(folder, report)
    return causal_lm


def meta_transformers(folder: Path) -> nn.Module:
    """Build the causal LM on the meta device: its modules and shapes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    require_usual_sizes(read_config(folder), origin=config_origin(folder))
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except _VENDOR_ERRORS as error:
        raise ModelError(f"model.path: transformers cannot build {folder}: {error}") from error


def _refuse_gaps(folder: Path, report: dict[str, Any]) -> None:
    """Refuse missing and unknown weights, which transformers would draw at random or drop."""
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(str(name) for name in report.get(key) or ())
        if names:
            raise ModelError(
                f"model.path: {folder}: {key.replace('_', ' ')}: {', '.join(names[:5])} "
                f"({len(names)} in all). The weights do not belong to this config.json."
            )


def _hub_experts(causal_lm: nn.Module) -> MoeShape | None:
    """Return the shape of stacked experts that are exported under the hub's names.

    A family that the native decoder does not know keeps the names that transformers gives it.
    """
    try:
        return decoder_config(causal_lm.config.to_dict()).moe
    except ModelError:
        return None


def _trunk(causal_lm: nn.Module) -> nn.Module:
    """Return the model without its head."""
    trunk = causal_lm.base_model
    if trunk is causal_lm or causal_lm.get_output_embeddings() is None:
        raise ModelError(
            f"model.path: {type(causal_lm).__name__} of transformers does not part into a trunk "
            "and an output matrix, and cannot be trained here."
        )
    return trunk


def _refuse_dropout(causal_lm: nn.Module) -> None:
    tokens = _probe_tokens(causal_lm, sum(_PROBE_LENGTHS))[None]
    with torch.random.fork_rng(devices=[tokens.device] if tokens.is_cuda else []):
        first, second = (
            _trunk(causal_lm)(input_ids=tokens, use_cache=False).last_hidden_state for _ in range(2)
        )
    if not _close(first, second):
        settings = causal_lm.config.to_dict().items()
        rates = [f"{key}={value}" for key, value in settings if "drop" in key and value]
        raise ModelError(
            f"model.path: {type(causal_lm).__name__} drops activations at random in training "
            f"({', '.join(rates)}), which cannot be repeated exactly. Set these to 0 in its "
            "config.json; lora.dropout is there for adapters."
        )


def _probe_logits(causal_lm: nn.Module) -> None:
    """Check that logits are linear in the hidden state, through the output weight only.

    The trunk's output is replaced by a multiple of itself: zero reveals an added bias, and a large
    multiple reveals a soft cap or a scale that small logits would hide.
    """
    tokens = _probe_tokens(causal_lm, sum(_PROBE_LENGTHS))[None]
    weight_VD = causal_lm.get_output_embeddings().weight
    hidden = _trunk(causal_lm)(input_ids=tokens, use_cache=False).last_hidden_state
    plain = hidden @ weight_VD.t()
    # Scale so that the largest logit is far beyond any soft cap.
    for factor in (0.0, _PROBE_LOGIT / float(plain.abs().max().clamp_min(1e-30))):

        def scale(module: nn.Module, args: Any, outputs: Any, factor: float = factor) -> Any:
            outputs.last_hidden_state = outputs.last_hidden_state * factor
            return outputs

        hook = _trunk(causal_lm).register_forward_hook(scale)
        try:
            logits = causal_lm(input_ids=tokens, use_cache=False).logits
        finally:
            hook.remove()
        expected = (hidden * factor) @ weight_VD.t()
        if logits.shape != expected.shape or not _close(logits.to(expected.dtype), expected):
            raise ModelError(
                f"model.path: {type(causal_lm).__name__} changes its logits after the output "
                "matrix (a soft cap, a scale or a bias), which cannot be trained exactly here."
            )


def _refuse_later_tokens(causal_lm: nn.Module) -> None:
    """Check that a hidden state does not depend on later tokens, which are what it predicts."""
    tokens_N = _probe_tokens(causal_lm, sum(_PROBE_LENGTHS))
    half = len(tokens_N) // 2
    whole, beginning = (
        _trunk(causal_lm)(input_ids=one[None], use_cache=False).last_hidden_state
        for one in (tokens_N, tokens_N[:half])
    )
    if not _close(whole[:, :half], beginning):
        raise ModelError(
            f"model.path: {type(causal_lm).__name__} lets tokens attend to later ones, which a "
            "model that is to write texts must not. Name a causal model (see is_causal and "
            "use_bidirectional_attention in its config.json)."
        )


def _probe_tokens(causal_lm: nn.Module, count: int) -> Tensor:
    vocab_size, _ = causal_lm.get_output_embeddings().weight.shape
    generator = torch.Generator("cpu").manual_seed(0)
    tokens_N = torch.randint(0, vocab_size, (count,), generator=generator)
    return tokens_N.to(causal_lm.get_output_embeddings().weight.device)


def _close(actual: Tensor, expected: Tensor) -> bool:
    # Far above rounding, far below what cross-talk or a soft cap causes.
    tolerance = 1e-4 if expected.dtype == torch.float32 else 3e-2
    limit = tolerance * float(expected.abs().max().clamp_min(1e-6))
    return bool((actual - expected).abs().max() <= limit)
