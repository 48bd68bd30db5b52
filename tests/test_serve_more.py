"""The server's own endpoints, ollama's API, and models that are loaded on demand."""

from __future__ import annotations

import json
import re
import shutil
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from edge.apps.serve.errors import ApiError
from edge.apps.serve.metrics import Histogram, Metrics
from edge.apps.serve.responses import KeptResponses
from tests.server_process import HELLO, Server
from tests.session_models import bundle
from tests.tool_samples import SCHEMA, TOOLS


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two models, as `edge pull` leaves them, and something that is not a model."""
    folder = tmp_path_factory.mktemp("models")
    for name, kind in (("tiny", "chat"), ("plain", "base")):
        shutil.copytree(bundle(kind), folder / name)
    (folder / "broken").mkdir()
    return folder


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGE_MODELS", str(store))
        options = ("--pulled", "--log", "--draft", "ngram")
        with Server(*options, bundle=str(bundle("bytes"))) as running:
            yield running


def asked(server: Server, path: str, body: Any = None) -> tuple[int, dict[str, str], Any]:
    return server.request("GET" if body is None else "POST", path, body)


# -- status and metrics --------------------------------------------------------------------------


def parsed(text: bytes) -> dict[str, float]:
    """Parse samples of Prometheus' format; each family's help and type precede its first one."""
    found: dict[str, float] = {}
    told: dict[str, str] = {}
    for line in text.decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            told[name] = kind
        elif not line.startswith("#"):
            match = re.fullmatch(r'([a-z_]+)((?:\{[a-z_]+=".*"\})?) (\S+)', line)
            assert match, line
            family = re.sub(r"_(bucket|sum|count)$", "", match[1])
            assert match[1] in told or told[family] == "histogram", line
            found[match[1] + match[2]] = float(match[3])
    return found


def test_metrics_count_what_happened(server: Server) -> None:
    before = parsed(asked(server, "/metrics")[2])
    client = server.client()
    hot: dict[str, Any] = {"model": "bytes", "messages": HELLO, "seed": 1, "max_tokens": 12}
    usage = [client.chat.completions.create(**hot).usage for _ in range(2)]
    asked(server, "/v1/nothing")
    asked(server, "/v1/chat/completions", {"messages": []})
    status, headers, text = asked(server, "/metrics")
    after = parsed(text)
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")

    def rose(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert rose('edge_requests_total{route="/v1/chat/completions",status="200"}') == 2
    assert rose('edge_requests_total{route="/v1/chat/completions",status="400"}') == 1
    assert rose('edge_requests_total{route="other",status="404"}') == 1
    assert rose("edge_generated_tokens_total") == sum(u.completion_tokens for u in usage if u)
    assert rose("edge_prompt_tokens_total") == sum(u.prompt_tokens for u in usage if u)
    assert rose("edge_reused_tokens_total") >= 1
    assert rose("edge_ttft_seconds_count") == rose("edge_tpot_seconds_count") == 2
    assert rose('edge_ttft_seconds_bucket{le="+Inf"}') == 2 and rose("edge_ttft_seconds_sum") > 0
    assert rose("edge_drafted_tokens_total") >= rose("edge_accepted_tokens_total") >= 0
    assert after["edge_requests_inside"] == after["edge_requests_waiting"] == 0
    assert after['edge_state_bytes{model="bytes"}'] > 0 == after["edge_reader_stuck"]
    assert server.request("GET", "/metrics", headers={"authorization": None})[0] == 401


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    counts = {labels.get("le", name): value for name, labels, value in histogram.samples("x")}
    assert counts == {"1": 2, "2": 3, "+Inf": 4, "x_sum": 12.0, "x_count": 4}
    odd = Metrics().text([("edge_temperature_celsius", {"sensor": 'a"\\\nb'}, 40)])
    assert 'edge_temperature_celsius{sensor="a\\"\\\\\\nb"} 40\n' in odd


def test_a_models_name_is_one_label_and_adds_no_line() -> None:
    name = 'a"} 1\nedge_reader_stuck 1\\'
    lines = Metrics().text([("edge_state_bytes", {"model": name}, 7)]).splitlines()
    assert lines[-1] == r'edge_state_bytes{model="a\"} 1\nedge_reader_stuck 1\\"} 7'
    assert sum(line.startswith("edge_reader_stuck") for line in lines) == 0


def logged(server: Server) -> list[dict[str, Any]]:
    lines = server.stderr.splitlines(keepends=True)
    return [json.loads(line) for line in lines if line[0] == "{" and line[-1] == "\n"]


def test_the_log_has_a_line_a_request_and_nothing_that_was_said(server: Server) -> None:
    secret = "the password is swordfish"
    body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 3, "stream": True}
    before = len(logged(server))
    asked(server, "/v1/chat/completions", body)
    asked(server, "/v1/completions", {"prompt": secret, "stream": 5})
    server.request("GET", "/v1/models\x1b[2J", headers={"authorization": "Bearer wrong"})
    asked(server, "/health")
    paths = "/v1/chat/completions", "/v1/completions"
    found: dict[str, Any] = {}
    while not found.keys() >= {*paths}:  # the log line is written after the answer
        time.sleep(0.01)
        lines = logged(server)
        found = {line["path"]: line for line in lines[before:]}
    done, refused = (found[path] for path in paths)
    assert done["status"] == 200
    assert done["generated_tokens"] == 3 and done["finish_reason"] == "length"
    assert done["client"] == "127.0.0.1" and done["prompt_tokens"] > 3 and done["seconds"] > 0
    assert refused["status"] == 400 and "prompt_tokens" not in refused
    assert "swordfish" not in server.stderr and server.key not in server.stderr
    assert "\x1b" not in server.stderr and not any(line["path"] == "/health" for line in lines)


# -- models that were pulled ---------------------------------------------------------------------


def test_every_pulled_model_answers_when_it_is_asked_for(server: Server) -> None:
    client = server.client()
    names = [found.id for found in client.models.list()]
    assert names == ["bytes", "plain", "tiny"] and client.models.retrieve("tiny").id == "tiny"
    given: dict[str, Any] = {"prompt": "one two", "max_tokens": 4, "temperature": 0}
    first = {name: client.completions.create(model=name, **given) for name in names}
    assert len({answer.system_fingerprint for answer in first.values()}) == 3
    for name in (*names, "tiny"):
        again = client.completions.create(model=name, **given)
        assert again.model == name and again.choices[0].text == first[name].choices[0].text
    with pytest.raises(openai.BadRequestError) as untaught:
        client.chat.completions.create(model="plain", messages=HELLO)
    assert untaught.value.code == "no_chat_template"
    for missing in ("broken", "../tiny", "demo"):
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model=missing, **given)


def test_a_model_that_cannot_be_loaded_leaves_the_others(server: Server, store: Path) -> None:
    shutil.copytree(store / "plain", store / "bad")
    try:
        (store / "bad" / "weights.bin").write_bytes(b"")
        status, _, body = asked(server, "/v1/completions", {"model": "bad", "prompt": "x"})
        assert status == 500 and str(store) not in body["error"]["message"]
        (store / "bad" / "manifest.json").write_bytes(b"{")
        status, _, body = asked(server, "/api/show", {"model": "bad"})
        assert status == 500 and "is not valid JSON" in body["error"]
    finally:
        shutil.rmtree(store / "bad")
    for body in ({"prompt": "x"}, {"model": "tiny", "prompt": "x"}):
        assert asked(server, "/v1/completions", body | {"max_tokens": 1})[0] == 200


# -- ollama's API --------------------------------------------------------------------------------

SHORT = {"seed": 1, "num_predict": 6, "temperature": 1.0}


def lines(body: bytes) -> list[dict[str, Any]]:
    """Return the lines of a chunked response; each chunk is one line here."""
    return [json.loads(line) for line in body.split(b"\r\n") if line.startswith(b"{")]


def test_ollamas_chat_and_generate(server: Server) -> None:
    ask = {"model": "bytes:latest", "messages": HELLO, "options": SHORT, "keep_alive": "5m"}
    status, headers, body = asked(server, "/api/chat", ask)
    assert status == 200 and headers["content-type"] == "application/x-ndjson"
    streamed = lines(body)
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    text = "".join(line["message"]["content"] for line in streamed)
    _, _, whole = asked(server, "/api/chat", ask | {"stream": False})
    assert whole["message"] == {"role": "assistant", "content": text} and text
    last = streamed[-1]
    assert (last["done_reason"], last["eval_count"]) == ("length", 6)
    assert last["total_duration"] > last["prompt_eval_duration"] > 0 < last["prompt_eval_count"]
    openai_said = server.client().chat.completions.create(
        model="bytes", messages=HELLO, seed=1, max_tokens=6, temperature=1.0
    )
    assert openai_said.choices[0].message.content == text

    one = {"model": "bytes", "prompt": HELLO[0]["content"], "options": SHORT, "stream": False}
    assert asked(server, "/api/generate", one)[2]["response"] == text
    raw = asked(server, "/api/generate", one | {"raw": True})[2]
    expected = server.client().completions.create(
        model="bytes", prompt=one["prompt"], seed=1, max_tokens=6, temperature=1.0
    )
    assert raw["response"] == expected.choices[0].text
    formed = asked(server, "/api/generate", one | {"format": {"enum": [1, 2]}})[2]
    assert formed["response"] in ("1", "2") and formed["done_reason"] == "stop"
    names = [model["name"] for model in asked(server, "/api/tags")[2]["models"]]
    assert names == ["bytes", "plain", "tiny"] and asked(server, "/api/version")[2]["version"]


def test_ollamas_logprobs(server: Server) -> None:
    wanted = {"logprobs": True, "top_logprobs": 2}
    openai_said = server.client().chat.completions.create(
        model="bytes", messages=HELLO, seed=1, max_tokens=6, temperature=1.0, logprobs=True,
        top_logprobs=2,
    )  # fmt: skip
    logged = openai_said.choices[0].logprobs
    assert logged is not None and logged.content is not None
    expected = [entry.model_dump() for entry in logged.content]
    chat = {"model": "bytes", "messages": HELLO, "options": SHORT, **wanted}
    one = {"model": "bytes", "prompt": HELLO[0]["content"], "options": SHORT, **wanted}
    for path, ask in (("/api/chat", chat), ("/api/generate", one)):
        assert asked(server, path, ask | {"stream": False})[2]["logprobs"] == expected
        streamed = lines(asked(server, path, ask)[2])
        assert [e for line in streamed for e in line.get("logprobs", [])] == expected
    raw = asked(server, "/api/generate", one | {"raw": True, "stream": False})[2]["logprobs"]
    assert len(raw) == 6 and all(len(entry["top_logprobs"]) == 2 for entry in raw)
    plain = asked(server, "/api/chat", {**chat, "logprobs": False, "top_logprobs": 0, "stream": 0})
    assert "logprobs" not in plain[2]


def test_ollamas_requests_that_only_load(server: Server) -> None:
    for path, ask, shown in (
        ("/api/generate", {}, {"response": ""}),
        ("/api/generate", {"prompt": "", "stream": True}, {"response": ""}),
        ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
    ):
        for keep, reason in ((None, "load"), ("5m", "load"), (0.0, "unload"), ("0s", "unload")):
            status, _, body = asked(server, path, {"model": "tiny", "keep_alive": keep, **ask})
            assert status == 200 and body.items() >= {"done": True, "done_reason": reason}.items()
            assert body.items() >= shown.items() and "eval_count" not in body
    assert [model["name"] for model in asked(server, "/api/ps")[2]["models"]] == ["tiny"]
    older = asked(server, "/api/embeddings", {"model": "tiny", "prompt": "a red ball"})[2]
    newer = asked(server, "/api/embed", {"model": "tiny", "input": "a red ball"})[2]
    assert older == {"embedding": newer["embeddings"][0]}


def test_ollamas_show_and_ps(server: Server, store: Path) -> None:
    status, _, body = asked(server, "/api/show", {"model": "tiny:latest"})
    manifest = json.loads((store / "tiny" / "manifest.json").read_text())
    assert status == 200 and body["template"] == (store / "tiny/chat_template.jinja").read_text()
    family, about = body["details"]["family"], body["model_info"]
    assert family == manifest["model"]["family"] == about["general.architecture"]
    assert about[f"{family}.block_count"] == len(manifest["model"]["layers"])
    assert body["details"]["quantization_level"] == manifest["quantization"]["recipe"]
    assert body["capabilities"] == ["completion", "embedding", "tools"]
    assert asked(server, "/api/show", {"model": "plain"})[2]["capabilities"][-1] == "embedding"
    assert asked(server, "/api/show", {"model": "../tiny"})[0] == 404
    asked(server, "/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1})
    [running] = asked(server, "/api/ps")[2]["models"]
    listed = {model["name"]: model for model in asked(server, "/api/tags")[2]["models"]}["tiny"]
    assert running["name"] == "tiny" and running["digest"] == listed["digest"]
    assert running["size"] > 0 == running["size_vram"] and listed["size"] > 0


# -- the API's responses -------------------------------------------------------------------------

FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
BRIEF: dict[str, Any] = {"model": "bytes", "temperature": 0, "max_output_tokens": 8}


def test_responses_go_on_from_one_another(server: Server) -> None:
    client = server.client()
    first = client.responses.create(input="Hello", instructions="Be kind.", **BRIEF)
    said = first.output_text
    talk: list[Any] = [{"role": "user", "content": "Hello"}]
    plain = client.chat.completions.create(
        model="bytes", messages=[{"role": "system", "content": "Be kind."}, *talk],
        temperature=0, max_tokens=8,
    )  # fmt: skip
    assert said == plain.choices[0].message.content and first.usage and plain.usage
    assert first.status == "incomplete" and first.incomplete_details
    assert first.incomplete_details.reason == "max_output_tokens"
    assert first.usage.total_tokens == plain.usage.total_tokens
    talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
    whole = client.responses.create(input=talk, **BRIEF)
    again = client.responses.create(input="And?", previous_response_id=first.id, **BRIEF)
    assert again.output_text == whole.output_text  # without the previous instructions
    with pytest.raises(openai.BadRequestError) as wrong:
        bad: Any = [{"role": "user", "content": 1}]
        client.responses.create(input=bad, previous_response_id=first.id, **BRIEF)
    assert wrong.value.param == "input.0.content"  # of what was sent, not of what was kept
    unkept = client.responses.create(input="Hello", store=False, **BRIEF)
    for name in (unkept.id, "resp_0"):
        with pytest.raises(openai.BadRequestError) as lost:
            client.responses.create(input="x", previous_response_id=name, **BRIEF)
        assert lost.value.code == "previous_response_not_found"


def test_responses_are_kept_within_their_memory() -> None:
    kept = KeptResponses(100)
    kept.keep("a", ["a" * 40])
    kept.keep("b", ["b" * 40])
    assert kept.items("a") == ["a" * 40]
    kept.keep("c", ["c" * 40])
    with pytest.raises(ApiError):
        kept.items("b")
    kept.items("a")
    sent = [{"id": [[] for _ in range(20_000)]}]  # 60 KB, and 1.1 MB of Python's lists
    most = KeptResponses()
    tracemalloc.start()
    for number in range(3):
        most.keep(str(number), json.loads(json.dumps(sent)))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert most.items("1") == sent and taken < 1 << 20
    kept.keep("d", ["d" * 200])  # too large by itself: nothing is kept
    for name in "acd":
        with pytest.raises(ApiError):
            kept.items(name)


def test_events_build_the_response(server: Server) -> None:
    client = server.client()
    more: Any = {"top_logprobs": 1, "include": ["message.output_text.logprobs"]}
    whole = client.responses.create(input="Hello", **BRIEF, **more)
    with client.responses.stream(input="Hello", **BRIEF, **more) as events:
        seen = list(events)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    text = "".join(one.delta for one in seen if one.type == "response.output_text.delta")
    last = seen[-1]
    assert last.type == "response.incomplete" and text == whole.output_text
    assert last.response.usage == whole.usage
    [made], [told] = last.response.output, whole.output
    assert made.type == told.type == "message" and made.status == told.status == "incomplete"
    assert made.content[0].to_dict() == told.content[0].to_dict()
    kinds = [event.type.removeprefix("response.") for event in seen]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:-1] == ["output_text.done", "content_part.done", "output_item.done"]


def test_responses_call_functions_and_keep_to_schemas(server: Server) -> None:
    client = server.client()
    more: Any = {
        "model": "bytes", "tools": FLAT[:1], "tool_choice": {"type": "function", "name": "go"},
        "parallel_tool_calls": False, "extra_body": {"seed": 3},
    }  # fmt: skip
    called = client.responses.create(input="Go left", **more)
    [call] = called.output
    assert call.type == "function_call" and call.name == "go" and called.status == "completed"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    with client.responses.stream(input="Go left", **more) as events:
        deltas = [one.delta for one in events if one.type.endswith("arguments.delta")]
    assert "".join(deltas) == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "there"}
    client.responses.create(input=[result], previous_response_id=called.id, **BRIEF)
    echoed: list[Any] = [{"role": "user", "content": "Go left"}, *called.output, result]
    client.responses.create(input=echoed, **BRIEF)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    formed = client.responses.create(model="bytes", input="x", text=form, temperature=0)
    jsonschema.validate(json.loads(formed.output_text), schema)


@pytest.mark.parametrize(
    "wrong, param, said",
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0", "only functions"),
        ({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens: must be"),
        ({"input": [{"type": "reasoning"}]}, "input.0", "function_call_output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input.0.content", "only text"),
        ({"input": [{"role": "u", "content": "x"}]}, "input.0.role", "input.0.role: must be"),
        ({"input": [{"role": "user", "content": "x"}, {"role": "user", "content": 1}],
          "instructions": "y"}, "input.1.content", "input.1.content: "),
        ({"input": [{"type": "function_call_output", "call_id": 1, "output": "x"}],
          "instructions": "y"}, "input.0.call_id", "input.0.call_id: "),
        ({"input": [{"role": "user", "content": "x"},
                    {"type": "function_call", "call_id": "1", "name": "go", "arguments": "["}]},
         "input.1", "a JSON object"),
        ({"instructions": 1}, "instructions", "instructions: must be"),
        ({"input": []}, "input", "input: must have at least 1 item"),
        ({"input": [{"role": "user"}]}, "input.0.content", "input.0.content: is missing"),
        ({"background": True, "truncation": "auto"}, "background", "background, truncation"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": 1}}}},
         "text.format.schema", "type"),
        ({"n": 2, "max_tool_calls": 1}, "n", "n, max_tool_calls"),
        ({"input": [{"role": "assistant", "content": "x", "tool_calls": "x"},
                    {"type": "function_call", "call_id": "1", "name": "go", "arguments": "{}"}]},
         "input.0.tool_calls", "must be a list"),
    ],
)  # fmt: skip
def test_responses_refuse(server: Server, wrong: Any, param: str, said: str) -> None:
    body = {"input": "x", "reasoning": {"effort": "none"}, "background": False} | wrong
    status, _, answer = asked(server, "/v1/responses", body)
    assert (status, answer["error"]["param"]) == (400, param) and said in answer["error"]["message"]


def test_embeddings_by_both_clients(server: Server) -> None:
    client, texts = server.client(), ["a red ball", "a blue one"]
    # the client asks for base64 by itself
    made = client.embeddings.create(model="bytes", input=texts)
    vectors = [one.embedding for one in made.data]
    assert [one.index for one in made.data] == [0, 1] and vectors[0] != vectors[1]
    assert made.usage.prompt_tokens == made.usage.total_tokens == len("".join(texts))
    assert sum(x * x for x in vectors[0]) == pytest.approx(1)
    plain = client.embeddings.create(
        model="bytes", input=list(b"a red ball"), encoding_format="float"
    )
    assert plain.data[0].embedding == vectors[0]
    last = client.embeddings.create(model="bytes", input="a", extra_body={"pooling": "last"})
    assert (
        last.data[0].embedding
        == client.embeddings.create(model="bytes", input="a").data[0].embedding
    )
    own = asked(server, "/api/embed", {"model": "bytes", "input": texts})[2]
    assert own["embeddings"] == vectors and own["prompt_eval_count"] == made.usage.prompt_tokens
    for wrong, param in (
        ({"input": ""}, "input"), ({"input": ["a", 3]}, "input"), ({"input": [256]}, "input"),
        ({"input": "a", "dimensions": 7}, "dimensions"), ({"input": "a", "n": 2}, "n"),
    ):  # fmt: skip
        status, _, said = asked(server, "/v1/embeddings", wrong)
        assert (status, said["error"]["param"]) == (400, param)


def test_ollamas_tools_and_refusals(server: Server) -> None:
    ask = {"messages": HELLO, "tools": TOOLS[:1], "format": None,
           "options": {"seed": 2, "num_predict": 500}, "stream": False}  # fmt: skip
    body: dict[str, Any] = asked(server, "/api/chat", ask)[2]
    called = [body["message"], {"role": "tool", "content": "there", "tool_name": "go"}]
    for call in body["message"].get("tool_calls", []):
        jsonschema.validate(call["function"]["arguments"], SCHEMA)
    assert asked(server, "/api/chat", ask | {"messages": [*HELLO, *called]})[0] == 200
    for path, wrong, said in (
        ("/api/chat", {"messages": HELLO, "options": {"mirostat": 1}}, "mirostat"),
        ("/api/chat", {"messages": HELLO, "options": 5}, "options"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["y"]}]}, "images"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, "system"),
        ("/api/generate", {"prompt": "x", "model": "nobody"}, "unknown model"),
        ("/api/chat", {"messages": HELLO, "n": 2, "context": [1]}, "n, context"),
        ("/api/chat", {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        ("/api/generate", {"prompt": "", "model": "nobody"}, "unknown model"),
        ("/api/chat", {"messages": HELLO, "options": {"n": 2, "tools": [1]}}, "options.n, options"),
    ):
        status, _, body = asked(server, path, wrong)
        assert status in (400, 404) and isinstance(body["error"], str) and said in body["error"]
