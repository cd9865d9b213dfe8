"""Load, warm up and step one rank. Everything here runs on the service's one compute thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from penstock_server.device.native.build import find_build
from penstock_server.engine.device import (
    DTYPES,
    check_device_on_node,
    choose_device,
    choose_num_threads,
    device_name,
    libraries,
    naming_full_memory,
    open_device,
)
from penstock_server.engine.device_progress import DeviceProgress
from penstock_server.engine.drafting.interface import Drafter
from penstock_server.engine.drafting.load import drafting_refusal, load_drafter
from penstock_server.engine.drafting.ngram import NgramDrafter
from penstock_server.engine.drafting.pooled import PooledDrafter
from penstock_server.engine.load import LoadModel, load_model, load_options
from penstock_server.engine.start import Parts, Start
from penstock_server.engine.stream import Runner
from penstock_server.engine.transfer import record_event
from penstock_server.engine.watermark import Watermark
from penstock_server.errors import ConfigError, GrammarError, ImageError
from penstock_server.grammar.compiler import GrammarCompiler
from penstock_server.host.background import run_in_background
from penstock_server.models.interface import CausalModel
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import Capacity, Description, ImageInput, LoadConfig, Node, WarmUpConfig
from penstock_server.protocol.phase import PhaseClock
from penstock_server.protocol.plan import Adapter, Grammar, Image, Plan, StepResult
from penstock_server.vision.encoded import ImageSize
from penstock_server.vision.encoder import ImageEncoder

logger = logging.getLogger(__name__)


def _image_input(images: ImageEncoder | None, *, has_adapter: bool) -> ImageInput | None:
    if images is None:
        return None
    return ImageInput(
        images.placeholder_id,
        images.placeholder,
        images.template_text,
        images.family.is_whole,
        images.family.is_prompt_whole,
        images.family.text_prefix,
        images.family.text_suffix,
        images.room_bytes,
        has_adapter,
    )


class Engine:
    """One rank of a model. Call `load`, then `warm_up`, then `launch` and `collect` for each plan in order."""

    def __init__(
        self,
        model: CausalModel,
        group: RankGroup,
        device: torch.device,
        block_tokens: int,
        watermark: Watermark | None = None,
        compiler: GrammarCompiler | None = None,
        cpu_isa: str = "",
        drafter: Drafter | None = None,
        recent_answer_tokens: int = 0,
    ) -> None:
        self.model = model
        self.progress = DeviceProgress(record_event) if device.type != "cpu" else None  # GPU only
        self._parts = Parts(
            model,
            group,
            device,
            block_tokens,
            watermark or Watermark.of(model.traits.vocab_size),
            compiler,
            cpu_isa,
            drafter or NgramDrafter(),
            recent_answer_tokens,
            self.progress,
        )
        self._ready: Runner | None = None
        self._backing: threading.Thread | None = None

    @classmethod
    def load(
        cls,
        config: LoadConfig,
        rank: int = 0,
        world_size: int = 1,
        load_model: LoadModel = load_model,
        node: Node | None = None,
    ) -> tuple[Engine, Description]:
        """Choose device, dtype and block size, connect to the other ranks, and load the model. Raises ConfigError for a
        model or an option that cannot be served."""
        clock = PhaseClock()
        if world_size > 1 and not config.rendezvous:
            raise ConfigError(f"{world_size} ranks need a rendezvous, none was given")
        local_rank, local_size = (rank, world_size) if node is None else (node.local_rank, node.local_size)
        device = choose_device(config.device, local_rank)
        check_device_on_node(device, node)
        options = load_options(config, device)
        dtype, block_tokens = options.dtype, options.block_tokens
        native = find_build(device, dtype, config.cpu_isa)
        torch.set_num_threads(choose_num_threads(config, local_size))
        open_device(device)
        with clock.phase("meet ranks"):
            backend = "nccl" if device.type == "cuda" else "gloo"
            group = RankGroup.join(rank, world_size, config.rendezvous, backend, native, config.num_stages, node)
        advice = "use a larger GPU, or more shards (--num-shard), or end the other processes"

        def read() -> CausalModel:
            with clock.phase("load model"), torch.inference_mode(), naming_full_memory(device, "the weights", advice):
                return load_model(options, group)

        model = run_in_background(read, device) if config.background else read()
        compiler = None
        if rank == 0 and model.pooler is None:
            compiler = GrammarCompiler(config.model_path, model.traits.vocab_size)
            if device.type != "cpu":
                # Reading it holds Python's GIL for long enough to delay many short steps. On a CPU steps are longer and
                # the memory is the model's own, so there the first grammar reads it.
                with clock.phase("read vocabulary"):
                    wait([compiler.read()])
        watermark = Watermark.of(model.traits.vocab_size, config.watermark_gamma, config.watermark_delta)

        def read_drafter() -> Drafter:
            phase = nullcontext() if config.speculative_model is None else clock.phase("load drafter")
            with phase, torch.inference_mode():
                return load_drafter(config.speculative_model, model, options, load_model, group)

        drafter = run_in_background(read_drafter, device) if config.background else read_drafter()
        draft_kv_bytes = drafter.kv_bytes_per_block if isinstance(drafter, PooledDrafter) else 0
        states = model.states
        if states is not None and block_tokens % states.chunk_tokens:
            raise ConfigError(
                f"KV blocks of {block_tokens} tokens cannot end with the states of this model, which are saved every "
                f"{states.chunk_tokens} tokens: {block_tokens} is no multiple of {states.chunk_tokens}"
            )
        description = Description(
            architecture=model.traits.architecture,
            dtype=next(name for name, value in DTYPES.items() if value == dtype),
            device=str(device),
            device_name=device_name(device),
            libraries=libraries(device),
            attention=model.traits.attention_name,
            vocab_size=model.traits.vocab_size,
            max_position_tokens=model.max_position_tokens,
            default_position_tokens=model.traits.default_position_tokens,
            weight_bytes=model.weight_bytes + drafter.num_bytes,
            kv_bytes_per_block=model.kv_bytes_per_block + draft_kv_bytes,
            phases=tuple(clock.phases),
            block_tokens=block_tokens,
            window_tokens=model.traits.window_tokens,
            decoder_prefix=model.traits.decoder_prefix,
            max_source_tokens=model.traits.max_source_tokens,
            pooling=None if model.pooler is None else model.pooler.pooling,
            num_dimensions=0 if model.pooler is None else model.pooler.num_dimensions,
            can_draft=not drafting_refusal(model, group),
            drafts_with_model=not drafter.is_lookup,
            drafts_extend_lookup=drafter.extends_lookup,
            state_bytes_per_sequence=0 if states is None else states.bytes_per_slot,
            snapshot_bytes=0 if states is None else states.bytes_per_snapshot,
            snapshot_reach_tokens=0 if states is None else states.reach_tokens,
            image_input=_image_input(
                model.images, has_adapter=model.adapters is not None and model.adapters.own_is_of_images
            ),
        )
        recent = config.recent_answer_tokens
        engine = cls(model, group, device, block_tokens, watermark, compiler, config.cpu_isa, drafter, recent)
        return engine, description

    def compile_grammar(self, grammar: Grammar) -> None:
        """Compile and cache a grammar. Any thread may call it while steps run. Raises GrammarError for a grammar that
        cannot be used."""
        if self._parts.compiler is None:
            raise GrammarError("grammars are compiled by the first rank only")
        self._parts.compiler.compile(grammar)

    def check_adapter(self, adapter: Adapter) -> None:
        """Raises ConfigError if `load_adapter` would, except for a lack of memory. Loads nothing."""
        if self.model.adapters is None:
            raise ConfigError("the model was loaded without adapters")
        self.model.adapters.check(adapter.folder)

    def load_adapter(self, adapter: Adapter, unloaded_ids: Sequence[int]) -> None:
        """Load an adapter, after freeing others, which no sequence has. Any thread may call it while steps run. Raises
        ConfigError for an adapter that cannot be used, or does not fit in memory."""
        if self.model.adapters is None:
            raise ConfigError("the model was loaded without adapters")
        for adapter_id in unloaded_ids:
            self.model.adapters.unload(adapter_id)
        advice = "lower --max-lora-slots, or --cuda-memory-fraction, which leaves more memory beside the KV cache"
        with naming_full_memory(self._parts.device, f"the adapter in {adapter.folder}", advice):
            # Steps run meanwhile, and have the processors first.
            run_in_background(partial(self.model.adapters.load, adapter), self._parts.device)

    def encode_images(self, images: Sequence[Image], is_awaited: Callable[[], bool] = lambda: True) -> list[ImageSize]:
        """Encode images. Any thread may call it while steps run. is_awaited: whether the caller still waits. Raises
        ImageError for an image that cannot be used."""
        if self.model.images is None:
            raise ImageError("the model reads no images")
        return self.model.images.encode(images, is_awaited)

    def close(self) -> None:
        """End the engine's processes, and leave the other ranks. It must not be used afterwards."""
        if self._parts.compiler is not None:
            self._parts.compiler.close()
        if self.model.images is not None:
            self.model.images.close()
        self._parts.group.leave()

    @torch.inference_mode()
    def warm_up(self, config: WarmUpConfig) -> Capacity:
        """Run the most expensive steps, measure the memory that is left, and allocate the pool. Raises ConfigError when
        the limits cannot be served."""
        advice = "lower --max-batch-prefill-tokens, --max-batch-size or --cuda-memory-fraction, or use more shards"
        with naming_full_memory(self._parts.device, "the largest step and its KV cache", advice):
            started = Start(self._parts, config).run()
        self._ready, self._backing = started.runner, started.backing
        return started.capacity

    def reset(self) -> None:
        """Forget every sequence: a new stream begins."""
        self._runner.reset()

    def launch(self, plan: Plan) -> Any:
        """Start one plan; see `StepRunner.launch`. Returns what `collect` takes."""
        return self._runner.launch(plan)

    def collect(self, pending: Any) -> StepResult:
        """The result of the oldest launched plan; see `StepRunner.collect`."""
        return self._runner.collect(pending)

    def step(self, plan: Plan) -> StepResult:
        """Run one plan to its end."""
        return self.collect(self.launch(plan))

    @property
    def is_backing_pool(self) -> bool:
        """Whether pages of the KV pool still take memory that the system reports as available."""
        return self._backing is not None and self._backing.is_alive()

    @property
    def is_asynchronous(self) -> bool:
        """Whether `launch` returns before the device has done the step."""
        return self._parts.device.type != "cpu"

    @property
    def _runner(self) -> Runner:
        assert self._ready is not None, "warm_up comes first"
        return self._ready
