"""Described symptoms: every stanza can match, and names illnesses that exist."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from homeostat.health.diagnose import diagnose
from homeostat.health.guesses.described import (
    MAX_CAUSES,
    Symptom,
    described,
    sentences,
    symptoms,
)
from homeostat.health.log import LogLine
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES
from homeostat.health.vocabulary import FAMILY_OF

# A cause and, after a colon, a sentence that must name it first.
TOLD = (Path(__file__).parent / "told.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("symptom", symptoms(), ids=lambda one: one.says)
def test_a_symptom_is_found_by_its_words_and_names_illnesses(symptom: Symptom) -> None:
    causes = [*symptom.causes, *(name for name, _ in symptom.if_said)]
    assert [name for name in causes if name not in FAMILY_OF] == []
    assert all(word == word.lower() and word for words in symptom.words for word in words)
    sentence = " ".join(words[0].strip() for words in symptom.words)
    found = described([LogLine(1, sentence)])
    assert symptom.says in {one.symptom.says for one in found}


@pytest.mark.parametrize("symptom", symptoms(), ids=lambda one: one.says)
def test_a_symptom_has_few_causes_and_each_once(symptom: Symptom) -> None:
    assert 0 < len(symptom.causes) <= MAX_CAUSES
    assert len(set(symptom.causes)) == len(symptom.causes)


def test_each_symptom_is_listed_once() -> None:
    names = [one.says for one in symptoms()]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("line", TOLD)
def test_a_sentence_names_its_usual_cause_first(line: str) -> None:
    cause, _, sentence = line.partition(": ")
    found = described([LogLine(1, sentence)])
    assert [one.causes[0] for one in found[:1]] == [cause]


def test_the_most_specific_symptom_comes_first() -> None:
    text = "The engine hangs after a weight update, GPU memory is fine"
    found = described([LogLine(1, text)])
    assert found[0].symptom.says == "it hangs after the weights were sent"
    weights = [one.weight for one in found]
    assert weights == sorted(weights, reverse=True)


def test_a_sentence_may_run_over_two_lines() -> None:
    lines = [LogLine(1, "We use two BOS"), LogLine(2, "tokens in each prompt")]
    assert described(lines)[0].causes[0] == "special-tokens-added"
    lines = [LogLine(1, "The loss of this run"), LogLine(2, "after step 40 is always NaN")]
    assert described(lines)[0].causes[0] == "nan-loss"


def test_what_one_sees_is_a_symptom_and_what_may_happen_is_none() -> None:
    assert described([LogLine(1, "I can see that the loss is NaN")])
    assert described([LogLine(1, "The model can\u2019t stop generating")])
    assert described([LogLine(1, "With this setting the loss can be NaN")]) == ()


def test_a_sentence_counts_beside_metrics() -> None:
    metrics = "".join(f"iter {step}: loss {3.5 - step / 100}, time: 95ms\n" for step in range(3))
    told = (
        "The fine-tuning works at first, but the training loss becomes NaN after some iterations.\n"
    )
    assert _is_told(told + metrics)
    assert not _is_told("Number of trainable parameters: 2125248\n" + metrics)


def _is_told(text: str) -> bool:
    findings = diagnose(read_text(text, config=None), RULES).findings
    return "symptom-described" in {one.name for one in findings}


def test_lines_of_programs_are_no_sentences() -> None:
    lines = ["Loading model with {'n_layer': 16}", "loss nan grad nan", "It is slow when I use it"]
    found = sentences([LogLine(number, text) for number, text in enumerate(lines, 1)])
    assert [line.number for line in found] == [3]


def test_much_prose_is_read_in_little_time() -> None:
    words = "I see that the loss of my run hangs on and it does not work with all of the memory"
    lines = [LogLine(number, f"{words} {number}.") for number in range(20_000)]
    start = time.process_time()
    described(lines)
    assert time.process_time() - start < 6.0


@pytest.mark.parametrize(
    "notice",
    [
        "Setting `pad_token_id` to `eos_token_id`:2 for open-end generation.",
        "INFO 11-01 10:00:00 [gpu_worker.py] Sleep mode freed 4.1 GiB memory, 4 GiB is in use.",
        "[rank0]: This can potentially cause a hang if this rank to GPU mapping is incorrect.",
        "Gradient checkpointing enabled, training may be slower",
        "The speedups for torchdynamo mostly come with GPU Ampere or higher",
        "MoE: 128 experts, top 8, router aux loss 0.001",
        "FlashAttention2 is not installed, using sdpa; training may be slower.",
        "Packing enabled: samples are packed to 4096 tokens, attention does not cross documents",
        "The tokenizer has new EOS tokens that differ from the model config and generation config.",
        "Loading checkpoint shards: 100% 4/4 [00:06<00:00,  1.52s/it]",
        "Capturing CUDA graph shapes: 100% 35/35 [00:14<00:00,  2.43it/s]",
        "Graph capturing finished in 14 secs, took 0.52 GiB",
        "model weights take 14.25GiB; non_torch_memory takes 0.11GiB; PyTorch activation peak "
        "memory takes 1.39GiB; the rest of the memory reserved for KV Cache is 55.31GiB.",
        "max_total_num_tokens=441812, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        "max_running_requests=4096, context_len=32768",
        "The server is fired up and ready to roll!",
        "Load weight begin. avail mem=78.50 GB",
        "Memory pool end. avail mem=9.86 GB",
        "ServerArgs(model_path='Qwen/Qwen2.5-7B', kv_cache_dtype='auto', quantization=None, "
        "disable_overlap_schedule=False, watchdog_timeout=300, sleep_on_idle=False)",
        "kv_cache_dtype=fp8_e4m3, calculate_kv_scales=False, quality of service: default, "
        "device_config=cuda",
        "'reward_model': {'enable': False, 'micro_batch_size': None, 'strategy': 'fsdp', "
        "'reward_manager': 'naive', 'max_length': None}",
        "'rollout': {'temperature': 1.0, 'top_k': -1, 'ignore_eos': False, "
        "'free_cache_engine': True, 'enforce_eager': False, 'n': 8, 'response_length': 1024}",
        "critic_warmup: 0, kl_ctrl: {type: fixed, kl_coef: 0.001}, use_kl_in_reward: False, "
        "adv_estimator: grpo",
        "Checkpoint tracker file does not exist: "
        "checkpoints/verl_grpo/latest_checkpointed_iteration.txt",
        "Training from scratch",
        "Resume from the latest checkpoint: checkpoints/verl_grpo/global_step_200",
        "filtered dataset len: 7468 of 7473, rows over 1024 tokens were removed",
        "Total training steps: 435",
        "***** Running training *****",
        "Num examples = 52,002  Num Epochs = 3  Gradient Accumulation steps = 8  Total "
        "optimization steps = 1,218",
        "Continuing training from checkpoint, will skip to saved global_step",
        "Will skip the first 1 epochs then the first 120 batches in the first epoch.",
        "The model is already on multiple devices. Skipping the move to device specified in "
        "`args`.",
        "You're using a Qwen2TokenizerFast tokenizer. Please note that with a fast tokenizer, "
        "using the `__call__` method is faster than using a method to encode the text followed "
        "by a call to the `pad` method to get a padded encoding.",
        "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`.",
        "The following generation flags are not valid and may be ignored: ['temperature', "
        "'top_p']. Set `TRANSFORMERS_VERBOSITY=info` for more details.",
        "No label_names provided for model class `PeftModelForCausalLM`. Since `PeftModel` "
        "hides base models input arguments, if label_names is not given, label_names can't be "
        "set automatically within `Trainer`.",
        "trainable params: 39,976,960 || all params: 8,070,234,112 || trainable%: 0.4954",
        "Installed CUDA version 12.1 does not match the version torch was compiled with 12.4 "
        "but since the APIs are compatible, accepting this combination",
        "Using /root/.cache/torch_extensions/py310_cu121 as PyTorch extensions root...",
        "Emitting ninja build file "
        "/root/.cache/torch_extensions/py310_cu121/cpu_adam/build.ninja...",
        "Building extension module cpu_adam...",
        "Allowing ninja to set a default number of workers... (overridable by setting the "
        "environment variable MAX_JOBS=N)",
        "Time to load cpu_adam op: 2.41 seconds",
        "Adam Optimizer #0 is created with AVX512 arithmetic capability.",
        "DeepSpeed Flops Profiler, optimizer: zero_stage 3, offload_optimizer: none, "
        "overlap_comm: true",
        "saving checkpoint at iteration 500 to /ckpt/iter_0000500 in torch_dist format",
        "successfully saved checkpoint from iteration 500 to /ckpt [ t 1/2, p 1/1 ]",
        "iteration 500/ 10000 | consumed samples: 128000 | elapsed time per iteration (ms): "
        "812.4 | learning rate: 2.9E-04 | global batch size: 256 | loss scale: 1.0 | number of "
        "skipped iterations: 0 | number of nan iterations: 0 |",
        "> building train, validation, and test datasets for GPT ...",
        "WARNING: one logger is given but no tensorboard, metrics go to stdout only",
        "Waiting for placement group to be scheduled",
        "Started a local Ray instance. View the dashboard at 127.0.0.1:8265",
        "Defaulting to user installation because normal site-packages is not writeable",
        "Building wheel for flash-attn (setup.py): still running...",
        "Building wheels for collected packages: flash-attn",
        "Successfully built flash-attn",
        "Server is not up yet. Retrying in 2.0 seconds...",
        "Detected kernel version 5.4.0, which is below the recommended minimum of 5.5.0; this "
        "can cause the process to hang. It is recommended to upgrade the kernel to the minimum "
        "version or higher.",
        "All the weights of LlamaForCausalLM were initialized from the model checkpoint at "
        "meta-llama/Llama-2-7b-hf.",
        "Some weights of LlamaForSequenceClassification were not initialized from the model "
        "checkpoint and are newly initialized: ['score.weight']",
        "Special tokens have been added in the vocabulary, make sure the associated word "
        "embeddings are fine-tuned or trained.",
        "Early stopping: the eval loss has not improved for 3 evaluations, the best model is "
        "loaded",
        "NCCL version 2.21.5+cuda12.4",
        "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks "
        "is : 1",
        "Automatically detected platform cuda.",
        "Chat template set: chatml; masking the prompt, loss on assistant turns only",
        "Dropped 14 samples longer than 2048 tokens, 51,988 samples left",
        "Sample packing efficiency: 0.97, estimated number of steps: 1,218",
        "Saving model checkpoint to ./out/checkpoint-500",
        "Deleting older checkpoint [out/checkpoint-100] due to args.save_total_limit",
        "tokenizer config file saved in ./out/checkpoint-500/tokenizer_config.json",
        "GPU memory usage: 71.2 GB allocated, 74.0 GB reserved",
        "Weights synced to the rollout engine in 3.4 s",
        "Rollout finished: 512 samples, mean response length 412, mean reward 0.31",
        "Prefill batch. #new-seq: 4, #new-token: 2048, #cached-token: 0, token usage: 0.01, "
        "#running-req: 12, #queue-req: 0",
        "Throughput: 12.4 requests/s, 3120.5 total tokens/s, 1560.2 output tokens/s",
    ],
)
def test_a_notice_of_a_library_is_no_symptom(notice: str) -> None:
    assert described([LogLine(1, notice)]) == ()


def test_a_word_counts_only_where_it_begins() -> None:
    assert described([LogLine(1, "The xhang of the trainingset")]) == ()
