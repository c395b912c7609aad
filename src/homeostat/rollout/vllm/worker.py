"""The part that runs inside vLLM's workers: it loads new weights, frees and restores the cache.

    bucket -> Receiver.unpack (checksums) -> load_weights, under HF names -> finish

vLLM mixes this class into its own worker (`worker_extension_cls`), on every tensor-parallel rank;
the engine calls it by `collective_rpc`. A layer is laid out again once all its weights have come
(vLLM's layerwise reload), which may be buckets after its first one: so tensors are copied out of a
bucket, whose bytes the sender may overwrite.

The names begin with `homeostat_` because vLLM refuses an extension that hides an attribute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from homeostat.sync.bucket import Bucket, Receiver, Transport


class WeightWorker:
    """Mixed into a vLLM worker, whose `model_runner`, `vllm_config` and `rank` it uses."""

    homeostat_receiver: Receiver | None = None
    # Parameters that the update has reached so far; None while no update is open.
    homeostat_loaded: set[str] | None = None
    homeostat_sizes: tuple[int, ...] | None = None

    def homeostat_connect(self: Any, transport: Transport) -> None:
        self.homeostat_close()
        size = self.vllm_config.parallel_config.world_size
        self.homeostat_receiver = transport.receiver(self.rank, size)

    def homeostat_apply(self: Any, bucket: Bucket) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            if self.homeostat_loaded is None:
                if self.vllm_config.device_config.device_type == "cpu":
                    _pack_experts_again(model)
                initialize_layerwise_reload(model)
                self.homeostat_loaded = set()
            weights = self.homeostat_receiver.unpack(bucket)
            self.homeostat_loaded |= model.load_weights(_copied(weights))

    def homeostat_finish(self: Any) -> list[str]:
        """Ends an update, whole or not; the parameters that it did not reach."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self.homeostat_loaded is None:
            return []
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            for layer in _tied_layers(model):
                layer.quant_method.process_weights_after_loading(layer)
        missing = {name for name, _ in model.named_parameters()} - self.homeostat_loaded
        self.homeostat_loaded = None
        return sorted(missing)

    def homeostat_close(self: Any) -> None:
        if self.homeostat_receiver is not None:
            self.homeostat_receiver.close()
            self.homeostat_receiver = None

    def homeostat_cache_bytes(self: Any) -> int:
        return sum(storage.nbytes() for storage in _storages(self.model_runner.kv_caches))

    def homeostat_free_cache(self: Any) -> None:
        """Shrink the cache's storages, on platforms without vLLM's sleep mode."""
        storages = _storages(self.model_runner.kv_caches)
        self.homeostat_sizes = tuple(storage.nbytes() for storage in storages)
        for storage in storages:
            storage.resize_(0)

    def homeostat_restore_cache(self: Any) -> None:
        assert self.homeostat_sizes is not None, "restore without free"
        storages = _storages(self.model_runner.kv_caches)
        for storage, size in zip(storages, self.homeostat_sizes, strict=True):
            storage.resize_(size)
        # Kernels may multiply masked places by zero: what lies there must be numbers.
        for cache in self.model_runner.kv_caches:
            cache.zero_()


def _copied(
    weights: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor.clone()) for name, tensor in weights)


def _pack_experts_again(model: torch.nn.Module) -> None:
    """A CPU packs experts' matrices when their kernel is made, and vLLM 0.32 makes it once: new
    weights would stay unpacked. Without a kernel it makes another one, which packs them."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _tied_layers(model: torch.nn.Module) -> Iterator[Any]:
    """Layers whose parameter is another one's, which vLLM has loaded. What they made of the old
    values (a CPU packs its matrices) is theirs to make again."""
    seen: set[int] = set()
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own & seen and hasattr(layer, "quant_method"):
            yield layer
        seen |= own


def _storages(caches: list[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once, in order: layers may be views of one."""
    return list(
        {cache.untyped_storage()._cdata: cache.untyped_storage() for cache in caches}.values()
    )
