"""Greedy answers of a checkpoint: by transformers, and by an engine that got its weights while it ran."""

import asyncio
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megasao.config.rollout import EmbeddedEngineConfig
from megasao.rollout.engines.base import GenerateRequest, SamplingParams
from megasao.rollout.engines.embedded import EmbeddedEngine
from megasao.storage.hf_directory import checkpoint_files

Prompts = list[list[int]]
NEW_TOKENS = 24


def by_transformers(checkpoint: Path, prompts: Prompts) -> Prompts:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


def by_engine(started_with: Path, checkpoint: Path, prompts: Prompts) -> Prompts:
    """An engine that starts with other weights and is given those of ``checkpoint`` as a new version."""

    async def answers() -> Prompts:
        engine = EmbeddedEngine(started_with, EmbeddedEngineConfig(slots=8), max_total_tokens=64, seed=0)
        await engine.start()
        try:
            files = checkpoint_files(checkpoint)
            await engine.prepare_weights(1, {name: each for file in files for name, each in load_file(file).items()})
            await engine.commit_weights(1)
            sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS)
            requests = [GenerateRequest(f"r{n}", f"s{n}", prompt, sampling) for n, prompt in enumerate(prompts)]
            results = await asyncio.gather(*(engine.generate(request) for request in requests))
        finally:
            await engine.close()
        assert all(result.weight_versions == [(0, 1)] for result in results)
        return [result.output_ids for result in results]

    return asyncio.run(asyncio.wait_for(answers(), 120))
