"""A transformers CausalLM as a `ModelRunner`: all slices of a step in one forward pass.

The model runs with `use_cache=False` and no mask: `AttentionInterface` hands its queries, keys and
values to the step's `PagedStep`, which travels through the model as a keyword argument. What must
not live here: how models are found and converted (sources.py), what is refused (support.py).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvtier.core.identity import KvDtype
from kvtier.engines.transformers.packing import pack_linears
from kvtier.engines.transformers.process import bars_on_terminals_only, give_back_memory
from kvtier.engines.transformers.support import eos_token_ids, kv_geometry, rope_digest
from kvtier.errors import CallerError
from kvtier.paged.attention import PagedStep, Scratch
from kvtier.paged.geometry import KvGeometry
from kvtier.paged.pool import TORCH_DTYPES, KvPool
from kvtier.paged.runner import BeforeLayer, Logits, Slice

ATTENTION: Final = "kvtier_paged"
"""Name of our attention in transformers' registry. It has no mask function, so none is built."""


def _paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **terms: object,
) -> tuple[Tensor, None]:
    """transformers' attention function; shapes as in `PagedStep.attend`."""
    step = terms.get("kvtier_step")
    if not isinstance(step, PagedStep):
        raise CallerError(f"attention {ATTENTION} runs only in steps of a TransformersRunner")
    layer = module.layer_idx
    assert isinstance(layer, int)
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise CallerError(f"layer {layer} is not causal, or has a mask of its own")
    for name in ("s_aux", "softcap", "position_bias"):
        if terms.get(name) is not None:
            raise CallerError(f"layer {layer} has {name}, which paged attention does not do")
    if step.window(layer) != terms.get("sliding_window"):
        raise CallerError(
            f"layer {layer} looks back {terms.get('sliding_window')} tokens, "
            f"the configuration said {step.window(layer)}"
        )
    return step.attend(layer, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, _paged_attention)


class TransformersRunner:
    """`ModelRunner` over a loaded model. Not thread-safe; holds the weights and one scratch."""

    __slots__ = ("_geometry", "_identity", "_model", "_scratch")

    def __init__(
        self, model: PreTrainedModel, model_id: str, revision: str, block_tokens: int
    ) -> None:
        """Takes the model over: attention and linear layers are exchanged. Runs a short step.

        `revision` is the digest of the weights as text. Raises CallerError, with the reason, for a
        model that this engine does not run.
        """
        config = model.config
        if not getattr(model, "_supports_attention_backend", False):
            raise CallerError(f"{config.model_type}: its attention cannot be exchanged")
        dtypes = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}
        if model.dtype not in dtypes:
            raise CallerError(f"{config.model_type}: weights of {model.dtype} are not supported")
        self._geometry = kv_geometry(config.get_text_config(), dtypes[model.dtype], block_tokens)
        self._identity = (model_id, revision)
        model.set_attn_implementation(ATTENTION)
        self._model = model.eval().requires_grad_(False)
        pack_linears(self._model)
        self._scratch = Scratch()
        self._try()

    @property
    def geometry(self) -> KvGeometry:
        return self._geometry

    @property
    def vocab_size(self) -> int:
        size: int = self._model.config.get_text_config().vocab_size
        return size

    @property
    def context_tokens(self) -> int:
        count: int = self._model.config.get_text_config().max_position_embeddings
        return count

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return eos_token_ids(self._model.generation_config, self._model.config.get_text_config())

    @property
    def model_id(self) -> str:
        return self._identity[0]

    @property
    def revision(self) -> str:
        return self._identity[1]

    @property
    def rope_digest(self) -> bytes:
        return rope_digest(self._model.config.get_text_config())

    @property
    def device(self) -> torch.device:
        device: torch.device = self._model.device
        return device

    @torch.inference_mode()
    def step(
        self, pool: KvPool, slices: Sequence[Slice], before_layer: BeforeLayer | None = None
    ) -> Tensor:
        """As `ModelRunner.step`. Tokens are not looked at: an id outside the vocabulary fails."""
        self._refuse_context(pool, slices)
        step = PagedStep(pool, slices, self._scratch, before_layer)
        tokens = [token for part in slices for token in part.tokens]
        wanted, stop = [], 0
        for part in slices:
            stop += len(part.tokens)
            if part.logits is Logits.LAST:
                wanted.append(stop - 1)
        terms = {
            "input_ids": torch.tensor([tokens], device=self.device),
            "position_ids": step.positions[None],
            "use_cache": False,
            "kvtier_step": step,
        }
        if not wanted:
            self._model.base_model(**terms)
            return torch.empty((0, self.vocab_size), device=self.device)
        rows = torch.tensor(wanted, device=self.device)
        logits: Tensor = self._model(**terms, logits_to_keep=rows).logits[0]
        return logits.float()

    def _refuse_context(self, pool: KvPool, slices: Sequence[Slice]) -> None:
        if pool.geometry != self._geometry:
            raise CallerError("the pool has another geometry than the model")
        reach = max((part.start + len(part.tokens) for part in slices), default=0)
        if reach > self.context_tokens:
            raise CallerError(f"{reach} tokens exceed the context of {self.context_tokens}")

    def _try(self) -> None:
        """A small step, so that what no configuration tells is found at start."""
        pool = KvPool(self._geometry, [1] * len(self._geometry.groups), self.device)
        layers: list[int] = []
        tokens = [0] * min(3, self._geometry.block_tokens, self.context_tokens)
        part = Slice(tokens, 0, [[0]] * len(self._geometry.groups))
        self.step(pool, [part], layers.append)
        if layers != list(range(self._geometry.layers_count)):
            raise CallerError(
                f"{self._model.config.model_type}: attention ran in layers {layers}, "
                f"not in each of {self._geometry.layers_count} once"
            )


def load_runner(
    directory: Path,
    model_id: str,
    revision: str,
    block_tokens: int,
    device: str = "cpu",
    dtype: KvDtype = KvDtype.FLOAT32,
) -> TransformersRunner:
    """Load a directory of config.json and safetensors. Blocks for as long as reading takes.

    Only safetensors are read and no code of the model's own is run. Raises CallerError for models
    that this engine does not run, before their weights are read where the configuration tells.
    """
    if dtype not in TORCH_DTYPES:
        raise CallerError(f"weights of {dtype.value} are not supported")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CallerError(f"{directory.name}: no model that transformers knows: {error}") from error
    kv_geometry(config.get_text_config(), dtype, block_tokens)
    bars_on_terminals_only()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=TORCH_DTYPES[dtype],
            use_safetensors=True,
            local_files_only=True,
        ).to(device)
    except (OSError, ValueError) as error:
        raise CallerError(f"{directory.name}: cannot be loaded: {error}") from error
    runner = TransformersRunner(model, model_id, revision, block_tokens)
    give_back_memory()
    return runner
