"""vlm_judge against a real HTTP server of the standard library that answers as each test says."""

import contextlib
import json
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from headwater_reward import registry
from headwater_reward.registry import Score, ScoreItem
from headwater_reward.settings import RewardSettings

from headwater.errors import DeadlineExceeded, FailedPrecondition, Internal, OutOfBudget, Unavailable

KEY = "sk-very-secret"
IMAGE = np.random.default_rng(0).integers(0, 256, (1, 24, 32, 3), np.uint8)


class Endpoint(ThreadingHTTPServer):
    """Answers with `answer(request)`: a status and the content of the model's message, or raw bytes."""

    daemon_threads = True

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.requests, self.running, self.most = answer, [], 0, 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with server.lock:
            server.requests.append((self.path, self.headers, request))
            server.running += 1
            server.most = max(server.most, server.running)
        status, content = server.answer(request)
        with server.lock:
            server.running -= 1
        if not isinstance(content, bytes):
            content = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        if status == 429:
            self.send_header("retry-after", "7")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def judge(tmp_path):
    """judge(answer, **options) -> (loaded reward, endpoint)."""
    servers = []

    def make(answer, **options):
        server = Endpoint(answer if callable(answer) else lambda request: answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        (tmp_path / "key").write_text(KEY + "\n")
        chosen = {
            "endpoint": f"http://127.0.0.1:{server.server_port}/v1", "model": "vlm",
            "api_key_file": str(tmp_path / "key"), **options,
        }  # fmt: skip
        (reward,) = registry.create([], {"vlm_judge": RewardSettings("vlm_judge", options=chosen)})
        reward.load(1)
        return reward, server

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


def items(*prompts, frames=IMAGE, deadline=float("inf"), **params):
    from headwater_reward.rewards.video import FrameParams

    return [ScoreItem(frames, prompt, {}, FrameParams(**params), deadline) for prompt in prompts]


def test_the_grade_is_the_score_and_the_request_is_what_openai_takes(judge):
    reward, server = judge((200, '{"score": 7.5}'))
    assert reward.score(items('say "hi"')) == [Score(7.5)]
    path, headers, request = server.requests[0]
    assert (path, headers["authorization"]) == ("/v1/chat/completions", f"Bearer {KEY}")
    assert request["response_format"]["json_schema"]["schema"]["properties"]["score"]["maximum"] == 10
    picture, text = request["messages"][0]["content"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert json.dumps('say "hi"') in text["text"]


@pytest.mark.parametrize(
    "content",
    [
        "7", "great", '{"score": "7"}', '{"score": true}', '{"score": 11}', '{"score": -0.1}', '{"score": NaN}',
        '{"score": 1e999}', '{"score": 7, "why": "nice"}', 'Sure: {"score": 7}', "[7]", "", None, b"<html>", b"{}",
        b"x" * 2_000_000, b"[" * 100_000, '{"score": 1' + "0" * 400 + "}",
    ],
)  # fmt: skip
def test_what_is_no_grade_in_range_is_an_error(judge, content):
    reward, _ = judge((200, content))
    (error,) = reward.score(items("x"))
    assert isinstance(error, Internal)
    assert error.reason == "REWARD_ANSWER_INVALID"


@pytest.mark.parametrize(
    ("status", "kind"), [(429, OutOfBudget), (503, Unavailable), (401, FailedPrecondition), (302, FailedPrecondition)]
)
def test_refusals_are_typed(judge, status, kind):
    reward, _ = judge((status, "no"))
    (error,) = reward.score(items("x"))
    assert type(error) is kind
    assert error.retry_after_s == (7.0 if status == 429 else None)


def test_one_bad_answer_fails_alone_and_requests_run_at_once(judge):
    def answer(request):
        time.sleep(0.2)
        text = request["messages"][0]["content"][1]["text"]
        return 200, "nonsense" if "bad" in text else '{"score": 3}'

    reward, server = judge(answer, concurrency=3)
    results = reward.score(items("a", "bad", "b", "c", "d", "e"))
    assert [type(result) for result in results] == [Score, Internal, Score, Score, Score, Score]
    assert server.most == 3


def test_the_callers_deadline_ends_the_wait(judge):
    release = threading.Event()

    def answer(request):
        release.wait(10)
        return 200, '{"score": 3}'

    reward, _ = judge(answer)
    started = time.monotonic()
    (error,) = reward.score(items("x", deadline=started + 0.4))
    release.set()
    assert isinstance(error, DeadlineExceeded)
    assert time.monotonic() - started < 3


def test_an_endpoint_that_is_away_is_unavailable(judge):
    reward, server = judge((200, "{}"))
    server.shutdown()
    server.server_close()
    (error,) = reward.score(items("x"))
    assert isinstance(error, Unavailable)


def test_frames_of_a_video_are_graded_one_by_one(judge):
    reward, server = judge((200, '{"score": 4}'))
    (score,) = reward.score(items("x", frames=np.concatenate([IMAGE] * 5)))
    assert (score.value, len(server.requests)) == (4.0, 5)


def test_the_key_is_in_no_message_and_no_log(judge, caplog):
    caplog.set_level(logging.DEBUG)
    for answer in ((200, '{"score": 1}'), (401, f"wrong key {KEY}"), (200, KEY)):
        reward, _ = judge(answer)
        (result,) = reward.score(items("x"))
        assert KEY not in str(result)
        assert KEY not in repr(result)
    assert KEY not in caplog.text


def test_a_key_goes_to_no_other_machine_in_plain_text(judge):
    with pytest.raises(FailedPrecondition, match="plain text"):
        judge((200, "{}"), endpoint="http://judge.example.org/v1")
    with pytest.raises(FailedPrecondition, match="cannot be read"):
        judge((200, "{}"), api_key_file="/nowhere/key")
