"""The processor's name and instructions, from what Linux says on both architectures."""

from pathlib import Path

import pytest

from homeostat.errors import EngineError
from homeostat.observe.processor import this_processor
from homeostat.rollout.vllm.options import require_computable

NEOVERSE = """processor\t: 0
BogoMIPS\t: 50.00
Features\t: fp asimd evtstrm fphp asimdhp{more}
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: {part}
"""
XEON = """processor\t: 0
model name\t: Some(R) Xeon @ 2.5GHz
flags\t\t: fpu avx2 avx512f{more}
"""


def processor(folder: Path, text: str, architecture: str):
    file = folder / "cpuinfo"
    file.write_text(text)
    return this_processor(file, architecture=architecture)


def test_an_arm_processor_is_named_by_its_part(tmp_path: Path) -> None:
    found = processor(tmp_path, NEOVERSE.format(part="0xd0c", more=""), "aarch64")
    assert found.describe() == "aarch64, Arm Neoverse-N1"
    assert "asimdhp" in found.features
    unknown = processor(tmp_path, NEOVERSE.format(part="0xfff", more=""), "aarch64")
    assert unknown.name == "Arm 0xfff"


def test_an_intel_processor_names_itself(tmp_path: Path) -> None:
    found = processor(tmp_path, XEON.format(more=" avx512_bf16"), "x86_64")
    assert found.describe() == "x86_64, Some(R) Xeon @ 2.5GHz"
    assert found.has_bf16


def test_where_nothing_is_told_nothing_is_claimed(tmp_path: Path) -> None:
    found = this_processor(tmp_path / "none", architecture="arm64")
    assert found.name
    assert not found.features


def test_bf16_of_vllm_is_refused_where_it_would_end_by_sigill(tmp_path: Path) -> None:
    without = processor(tmp_path, NEOVERSE.format(part="0xd0c", more=""), "aarch64")
    with pytest.raises(EngineError, match=r"Neoverse-N1.*SIGILL.*engine\.dtype=float32"):
        require_computable("bfloat16", processor=without)
    require_computable("float16", processor=without)
    require_computable("float32", processor=without)
    having = processor(tmp_path, NEOVERSE.format(part="0xd49", more=" bf16"), "aarch64")
    require_computable("bfloat16", processor=having)


def test_on_x86_vllm_has_a_library_without_bf16_instructions(tmp_path: Path) -> None:
    require_computable("bfloat16", processor=processor(tmp_path, XEON.format(more=""), "x86_64"))
