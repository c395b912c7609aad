"""The sound folder that fuzz_kinds damages: small enough to be copied for every case."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ASSETS = Path(__file__).resolve().parents[1] / "recipes" / "assets" / "tiny-chat"
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


def write_files(folder: Path) -> None:
    """Model folder and rows in three formats."""
    shutil.copytree(ASSETS, folder / "model")
    config = json.loads((ASSETS / "config.json").read_bytes())
    (folder / "model" / "config.json").write_text(json.dumps({**config, **SIZES}, indent=1))
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdef", k=rng.randint(1, 9))) for _ in range(12)]
    rows = [
        {"messages": [{"role": "user", "content": f"turn {word}"},
                      {"role": "assistant", "content": word[::-1]}]}
        for word in words
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = pa.table({"prompt": [f"turn {w} " for w in words], "completion": words})
    pq.write_table(pairs, folder / "pairs.parquet")
    _write_saved(folder / "saved", pa.table({"text": words}))


def _write_saved(folder: Path, table: pa.Table) -> None:
    """As datasets' save_to_disk does."""
    folder.mkdir()
    name = "data-00000-of-00001.arrow"
    with pa.ipc.new_stream(str(folder / name), table.schema) as stream:
        stream.write_table(table)
    state = {"_data_files": [{"filename": name}], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state, indent=1))


def write_gguf(path: Path, tensors: dict[str, Any]) -> None:
    """The model as llama.cpp would have it; what q and k hold is of no matter here."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_context_length(2048)
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_key_length(SIZES["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    _add_tokenizer(writer, num_tokens=tensors["model.embed_tokens.weight"].shape[0])
    names = {
        "embed_tokens": "token_embd", "model.norm": "output_norm", "q_proj": "blk.0.attn_q",
        "k_proj": "blk.0.attn_k", "v_proj": "blk.0.attn_v", "o_proj": "blk.0.attn_output",
        "input_layernorm": "blk.0.attn_norm", "post_attention_layernorm": "blk.0.ffn_norm",
        "gate_proj": "blk.0.ffn_gate", "up_proj": "blk.0.ffn_up", "down_proj": "blk.0.ffn_down",
    }  # fmt: skip
    for name, tensor in tensors.items():
        ours = next(new for old, new in names.items() if old in name)
        writer.add_tensor(f"{ours}.weight", tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, *, num_tokens: int) -> None:
    """A tokenizer in the file itself, of as many tokens as the model has."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))][:num_tokens]
    words += [f"w{number}" for number in range(num_tokens - len(words))]
    kinds = [2, 3, 3, *[6] * 256, *[1] * num_tokens][:num_tokens]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * num_tokens)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
