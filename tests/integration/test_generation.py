"""Generating, exporting and serving from what training leaves behind."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import tiny
from tests.support.runs import train
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from homeostat import Model
from homeostat.cli.verbs import app
from homeostat.errors import CheckpointError, DataError, ModelError
from homeostat.generation.choice import choose
from homeostat.generation.conversation import Conversation
from homeostat.generation.engine_thread import EngineThread
from homeostat.generation.exporting import export_model
from homeostat.generation.loading import load_text_model, open_engine
from homeostat.generation.prompt_file import read_prompts
from homeostat.generation.prompting import SamplingOptions, prompt_tokens
from homeostat.generation.sampling_run import SamplingRun
from homeostat.generation.server import TextServer, TextService

LORA = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A folder with a run of all weights that has no export, and one of an adapter."""
    folder = tmp_path_factory.mktemp("runs")
    short = {"max_steps": 2, "batch_rows": 4, "threads": 1, "lr": 1e-2}
    train(tiny.config(folder, name="whole", trainer=short))
    export_model(choose(folder / "runs" / "whole"), folder / "base")
    model = {"path": str(folder / "base"), "init": "pretrained"}
    train(tiny.config(folder, name="adapter", model=model, lora=LORA, trainer=short))
    return folder


def logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def own_logits(choice, tokens: list[int]) -> torch.Tensor:
    from homeostat.ops.attention import PackedLayout

    module = load_text_model(choice, device="cpu").loaded.module
    layout = PackedLayout.of([len(tokens)], torch.device("cpu"))
    with torch.no_grad():
        hidden = module.hidden(torch.tensor(tokens), torch.arange(len(tokens)), layout)
        return hidden @ module.output_weight().T


@pytest.fixture(scope="module")
def model(runs):
    return load_text_model(choose(runs / "base"), device="cpu")


def sampled(model, texts: list[str], *, samples: int = 1, **options) -> list[list[str]]:
    prompts = [prompt_tokens(text, model.tokenizer, as_chat=True) for text in texts]
    run = SamplingRun(
        open_engine(model, context=96),
        model.tokenizer,
        prompts,
        SamplingOptions(max_new_tokens=12, **options),
        samples=samples,
        seed=3,
    )
    return [[answer.text for answer in answers] for _, answers in run.answers()]


def test_an_interrupted_run_is_exported_from_its_checkpoint(runs):
    run = runs / "runs" / "whole"
    assert not list(run.glob("checkpoints/*/hf"))
    assert torch.allclose(
        logits(runs / "base", [5, 6, 7]), own_logits(choose(run), [5, 6, 7]), atol=1e-5
    )


def test_an_adapter_is_merged_or_exported_alone(runs, tmp_path):
    run = choose(runs / "runs" / "adapter")
    export_model(run, tmp_path / "merged")
    export_model(run, tmp_path / "adapter", adapter_only=True)
    wanted = own_logits(run, [5, 6, 7])
    assert torch.allclose(logits(tmp_path / "merged", [5, 6, 7]), wanted, atol=1e-5)
    again = own_logits(choose(tmp_path / "adapter"), [5, 6, 7])
    assert torch.allclose(again, wanted, atol=1e-5)
    assert not torch.allclose(logits(runs / "base", [5, 6, 7]), wanted, atol=1e-3)


def test_an_exported_adapter_is_used_as_a_model_is(runs, tmp_path):
    run = runs / "runs" / "adapter"
    export_model(choose(run), tmp_path / "adapter", adapter_only=True)
    export_model(choose(run), tmp_path / "merged")
    greedy = ("--max-new-tokens", "4", "--temperature", "0")
    models = (run, tmp_path / "adapter", tmp_path / "merged")
    words = [["generate", str(one), "turn around abc", *greedy] for one in models]
    texts = {CliRunner().invoke(app, line, catch_exceptions=False).stdout for line in words}
    assert len(texts) == 1
    chat = ["chat", str(tmp_path / "adapter"), *greedy]
    found = CliRunner().invoke(app, chat, input="turn around abc", catch_exceptions=False)
    assert found.stdout == texts.pop()
    assert f"adapter on {runs / 'base'}" in found.stderr


def test_a_run_needs_the_adapter_that_it_started_from_no_more(runs, tmp_path):
    start = tmp_path / "adapter"
    export_model(choose(runs / "runs" / "adapter"), start, adapter_only=True)
    shutil.copytree(runs / "base", tmp_path / "elsewhere")
    short = {"max_steps": 1, "batch_rows": 4, "threads": 1}
    raw = tiny.recipe(
        tmp_path,
        model={"path": str(tmp_path / "elsewhere"), "init": "pretrained"},
        lora=LORA | {"path": str(start)},
        trainer=short,
    )
    (tmp_path / "recipe.yaml").write_text(json.dumps(raw))
    words = ["check", str(tmp_path / "recipe.yaml"), "--format", "json"]
    found = json.loads(CliRunner().invoke(app, words, catch_exceptions=False).stdout)
    (said,) = (item for item in found["items"] if item["name"] == "adapter")
    assert (said["level"], said["facts"]) == ("warning", {"named_base": str(runs / "base")})
    train(tiny.config(tmp_path, **{name: raw[name] for name in ("model", "lora", "trainer")}))
    run = choose(tmp_path / "runs" / "run")
    before = own_logits(run, [5, 6, 7])
    shutil.rmtree(start)
    assert torch.equal(own_logits(run, [5, 6, 7]), before)


def test_low_precision_of_a_run_is_said_where_its_model_is_used(tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    tiny.write_model(tmp_path / "model", **sizes)
    short = {"max_steps": 2, "batch_rows": 4, "threads": 1, "fp8": {"start_step": 2}}
    run = tiny.config(tmp_path, trainer=short, checkpoint={"interval_steps": 1, "export": "off"})
    train(run)
    words = ["generate", str(run.run_dir), "a", "--max-new-tokens", "2"]
    said = CliRunner().invoke(app, words, catch_exceptions=False).stderr
    assert said.startswith("computed in float32; the run computes its linear layers in FP8")
    # Its first step was not in FP8.
    before = CliRunner().invoke(app, [*words, "--step", "1"], catch_exceptions=False)
    assert "FP8" not in before.stderr
    assert Model(run.run_dir, device="cpu").note == said.strip()


def test_a_run_that_has_saved_nothing_says_so(runs, tmp_path):
    folder = tmp_path / "young"
    folder.mkdir()
    for name in ("config.json", "events.jsonl"):
        shutil.copy(runs / "runs" / "whole" / name, folder)
    with pytest.raises(CheckpointError, match="young is the folder of a run that has saved no"):
        choose(folder)


def test_an_export_overwrites_nothing_and_keeps_its_precision(runs, tmp_path):
    with pytest.raises(ModelError, match="exists already"):
        export_model(choose(runs / "base"), runs / "base")
    export_model(choose(runs / "base"), tmp_path / "half", dtype="bf16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    export_model(choose(tmp_path / "half"), tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_the_step_of_a_run_can_be_chosen(runs):
    run = runs / "runs" / "whole"
    assert choose(run).checkpoint.step == choose(run, step="latest").checkpoint.step == 2
    assert choose(run / "checkpoints" / "step_00000002").checkpoint.step == 2
    with pytest.raises(CheckpointError, match="best"):
        choose(run, step="best")
    with pytest.raises(CheckpointError, match="number, best or latest"):
        choose(run, step="newest")
    with pytest.raises(CheckpointError, match="--step 99: there is no such checkpoint"):
        choose(run, step="99")
    with pytest.raises(ModelError, match="--step has no meaning"):
        choose(runs / "base", step="2")
    with pytest.raises(ModelError, match="does not exist"):
        choose(runs / "nowhere")


def test_a_run_whose_config_is_damaged_is_named(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json: .* the whole file: Invalid JSON"):
        choose(tmp_path)


def test_answers_repeat_and_do_not_depend_on_the_batch(model):
    both = sampled(model, ["turn around abc", "turn around fed"], samples=2)
    assert both == sampled(model, ["turn around abc", "turn around fed"], samples=2)
    assert both[0][0] != both[0][1], "samples of one prompt have their own noise"
    assert sampled(model, ["turn around abc"], samples=2)[0] == both[0]


def test_a_streamed_answer_is_the_whole_answer(model):
    prompt = prompt_tokens("turn around abc", model.tokenizer, as_chat=True)
    options = SamplingOptions(max_new_tokens=12)
    run = SamplingRun(
        open_engine(model, context=96), model.tokenizer, [prompt], options, samples=1, seed=3
    )
    assert "".join(run.pieces()) == sampled(model, ["turn around abc"])[0][0]


def test_a_conversation_remembers_its_turns(model):
    talk = Conversation(
        open_engine(model, context=96, max_concurrency=1),
        model.tokenizer,
        SamplingOptions(max_new_tokens=6),
    )
    first = "".join(talk.ask("turn around abc"))
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]
    assert talk.messages[1]["content"] == first
    assert talk.forget_answer()
    "".join(talk.answer())
    with pytest.raises(DataError, match="tokens"):
        list(talk.ask("a" * 200))
    assert len(talk.messages) == 2, "a message that cannot be answered is forgotten"


def test_a_chat_answers_and_obeys_commands(runs):
    lines = ["turn around abc", "/retry", "/temperature 0", "/temperature 1e-40", "/nope"]
    lines += [
        " /etc\\",
        "and more",
        "/system Be brief.",
        "/retry",
        "",
        "abc",
        "a" * 5000,
        "abc",
        "/help",
    ]
    words = ["chat", str(runs / "base"), "--max-new-tokens", "4", "--context", "96"]
    found = CliRunner().invoke(app, words, input="\n".join(lines))
    assert found.exit_code == 0, found.output
    said = [line for line in found.stderr.splitlines() if line.startswith("[")]
    kinds = [re.sub(r"\d+ tokens?, \d+ a second", "N", line)[:40] for line in said]
    answer = "[N, cut at the limit]"
    assert "/help lists commands" in said[0]
    assert kinds[1:4] == [answer, answer, "[temperature 0]"]
    assert said[4].startswith("[temperature 0; to change it")
    assert said[5].startswith("[no command is /nope")
    assert kinds[6] == answer, "a message over two lines that begins with a slash"
    assert said[7] == "[a new chat, with this system message]"
    assert said[8] == "[there is no answer yet]"
    assert (kinds[9], kinds[11], len(said)) == (answer, answer, 12)
    assert said[10].endswith("/new starts again]")
    assert "/temperature T" in found.stdout


def test_bad_prompt_files_name_the_line(model, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abc"}\n{"question": "abc"}\n')
    with pytest.raises(DataError, match=r"prompts.jsonl:2: .*`prompt` or `messages`"):
        read_prompts(file, model.tokenizer, as_chat=True, system=None)
    file.write_text('{"prompt": "abc"}\n\n{"messages": [{"role": "user", "content": "x"}]}\n')
    assert len(read_prompts(file, model.tokenizer, as_chat=True, system=None)) == 2


@pytest.fixture(scope="module")
def server(model):
    with EngineThread(open_engine(model, context=96)) as thread:
        service = TextService(thread, model.tokenizer, name="tiny")
        server = TextServer(service, port=0)
        worker = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        worker.start()
        yield server
        server.shutdown()
        server.server_close()
        worker.join()


def ask(server, path: str, body, *, host: str = "127.0.0.1") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, body=data, headers={"Host": f"{host}:{server.port}"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def test_the_server_answers_as_generate_does(server, model):
    messages = [{"role": "user", "content": "turn around abc"}]
    body = {"messages": messages, "max_tokens": 12, "seed": 3, "n": 2}
    status, text = ask(server, "/v1/chat/completions", body)
    assert status == 200, text
    got = json.loads(text)
    texts = [choice["message"]["content"] for choice in got["choices"]]
    assert texts == sampled(model, ["turn around abc"], samples=2)[0]
    assert got["usage"]["total_tokens"] > got["usage"]["prompt_tokens"] > 0
    assert json.loads(ask(server, "/v1/chat/completions", body)[1])["choices"] == got["choices"]


def test_a_chat_with_a_model_without_a_template_is_refused_with_the_way_out(
    server, model, monkeypatch
):
    monkeypatch.setattr(model.tokenizer, "chat_template", None)
    messages = [{"role": "user", "content": "turn around abc"}]
    status, text = ask(server, "/v1/chat/completions", {"messages": messages})
    assert (status, "--chat-template FILE" in text) == (400, True), text


def test_a_streamed_response_adds_up_to_the_whole_one(server):
    body = {"prompt": "turn around abc", "max_tokens": 12, "seed": 1}
    whole = json.loads(ask(server, "/v1/completions", body)[1])["choices"][0]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    status, text = ask(server, "/v1/completions", {**body, **options})
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert status == 200
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == whole["text"]
    assert chunks[-2]["choices"][0]["finish_reason"] == whole["finish_reason"]
    assert chunks[-1]["usage"]["completion_tokens"] > 0


def test_scores_of_a_prompt_are_those_of_transformers(server, runs):
    tokens = [5, 9, 12, 7, 8]
    body = {"prompt": tokens, "max_tokens": 0, "echo": True, "logprobs": 1}
    status, text = ask(server, "/v1/completions", body)
    assert status == 200, text
    found = json.loads(text)["choices"][0]["logprobs"]
    wanted = torch.log_softmax(logits(runs / "base", tokens)[:-1].double(), dim=-1)
    target = wanted[range(4), tokens[1:]].numpy()
    assert found["token_logprobs"][0] is None
    np.testing.assert_allclose(found["token_logprobs"][1:], target, atol=1e-4)
    best = [max(top.values()) for top in found["top_logprobs"][1:]]
    np.testing.assert_allclose(best, wanted.max(dim=-1).values.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": "a", "frequency_penalty": 1.0}, "frequency_penalty"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10_000}, "context"),
        ({"prompt": "a", "temprature": 1.0}, "temprature"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": False}, "stop"),
        ({"prompt": "a", "stream_options": 0}, "stream_options"),
        ({"prompt": "a", "stream_options": {"include_usage": "no"}}, "include_usage"),
        ({"prompt": [10**9]}, "vocabulary"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature"),
        ([], "object"),
        (b"{", "JSON"),
        (b"[" * 100_000, "JSON"),
    ],
)
def test_a_body_that_cannot_be_served_names_the_field(server, body, field):
    status, text = ask(server, "/v1/completions", body)
    assert status == 400
    assert field in json.loads(text)["error"]["message"]


def test_top_logprobs_without_logprobs_are_refused(server):
    messages = [{"role": "user", "content": "turn around abc"}]
    body = {"messages": messages, "max_tokens": 1, "top_logprobs": 2}
    status, text = ask(server, "/v1/chat/completions", body)
    assert (status, "Set logprobs to true" in text) == (400, True), text


def test_another_name_than_loopback_is_refused(server):
    status, _ = ask(server, "/v1/completions", {"prompt": "a"}, host="attacker.example")
    assert status == 403
    status, _ = ask(server, "/v1/completions", {"prompt": "a", "max_tokens": 1}, host="LocalHost")
    assert status == 200


def test_an_unknown_token_to_be_scored_is_refused_and_the_server_goes_on(server):
    body = {"prompt": [10**9], "max_tokens": 0, "echo": True, "logprobs": 1}
    status, text = ask(server, "/v1/completions", body)
    assert (status, "vocabulary" in text) == (400, True), text
    assert ask(server, "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [("/v1/embeddings", {}, 404), ("/v1/completions", {"Transfer-Encoding": "chunked"}, 400)],
)
def test_a_body_that_was_not_read_is_not_taken_for_the_next_request(server, path, headers, status):
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    client.request("POST", path, body=iter([body]) if headers else body, headers=headers)
    response = client.getresponse()
    response.read()
    assert response.status == status
    client.request("POST", "/v1/completions", body=body)
    assert client.getresponse().status == 200
    client.close()


def test_a_temperature_that_would_overflow_is_refused_and_the_server_goes_on(server):
    body = {"prompt": "abc", "max_tokens": 2}
    status, text = ask(server, "/v1/completions", {**body, "temperature": 1e-40})
    assert (status, "temperature is 1e-40" in text) == (400, True), text
    # The least that is accepted is sampled from, and is the likeliest token.
    found = [
        json.loads(ask(server, "/v1/completions", {**body, "temperature": temperature})[1])
        for temperature in (0, 1e-5)
    ]
    assert found[0]["choices"] == found[1]["choices"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * 2_000_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 2_000_000}]}),
    ],
)
def test_a_text_far_beyond_the_context_is_refused_without_being_tokenised(server, path, body):
    status, text = ask(server, path, {**body, "max_tokens": 2})
    assert status == 400
    # A lower bound by the length, which is all that is known of it.
    assert re.search(r"at least \d+ tokens, and the context has 96", text), text


def test_a_limit_that_is_null_leaves_the_other_one(server):
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 2, "seed": 1}
    answers = [
        json.loads(ask(server, "/v1/chat/completions", {**body, **more})[1])["choices"]
        for more in ({}, {"max_completion_tokens": None})
    ]
    assert answers[0] == answers[1]


def test_a_client_that_hangs_up_leaves_no_traceback(server, capfd):
    refused = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n[]"
    for wanted in (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", refused):
        for _ in range(5):
            connection = socket.create_connection(("127.0.0.1", server.port))
            connection.sendall(wanted)
            # Closing resets the connection: nothing may be written to it, nor read.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    assert ask(server, "/v1/completions", {"prompt": "abc", "max_tokens": 1})[0] == 200
    time.sleep(0.5)
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_that_goes_away_frees_the_engine(server):
    body = json.dumps({"prompt": "abc", "max_tokens": 80, "stop": "\u2603", "n": 64}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
        )
        client.sendall(head.encode() + b"\r\n" + body)
    # The engine must be free again: an answer comes, and nothing of the old request is left.
    status, _ = ask(server, "/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert status == 200
    thread = server.service.thread
    for _ in range(200):
        if thread.call(lambda: len(thread.engine.life.in_flight)) == 0:
            return
        threading.Event().wait(0.05)
    raise AssertionError("requests of a client that went away are still in the engine")
