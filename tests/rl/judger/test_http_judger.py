"""A reward service that answers, fails, comes back, and lies."""

import asyncio
import socket

import pytest

from xtuner.v1.rl.judger import JudgerConfig


def judge(url, state, **fields):
    config = JudgerConfig(judger_name="service", reward_handler=url, **{"retry_delay": 0.01, **fields})
    return asyncio.run(config.build().judge(state))


def test_posts_the_three_fields_and_takes_the_reply(service, sample):
    server = service((200, {"score": 0.5, "why": "short"}))
    state = judge(server.url, sample("é", 4), extra_info={"k": [1]})
    assert state.reward == {"score": 0.5, "why": "short"}
    assert server.requests == [{"response": "é", "label": 4, "extra_info": {"k": [1]}}]


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_a_passing_failure_is_tried_again(status, service, sample):
    server = service((status, "busy"), (status, "busy"), (200, {"score": 1}))
    assert judge(server.url, sample()).reward == {"score": 1.0}
    assert len(server.requests) == 3


def test_tries_are_bounded(service, sample):
    server = service((503, "busy"))
    state = judge(server.url, sample(), max_retries=2)
    assert state.reward is None and "HTTP 503: busy after 3 tries" in state.judge_error
    assert len(server.requests) == 3


def test_a_refusal_is_final(service, sample):
    server = service((422, "label must be a string"))
    assert "HTTP 422: label must be a string" in judge(server.url, sample()).judge_error
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("body", "reason"),
    [("<html>", "not JSON"), ({"result": 1}, "no 'score'"), ('{"score": NaN}', "finite"), ("null", "must be a number")],
)
def test_a_reply_without_a_score_is_an_error(body, reason, service, sample):
    assert reason in judge(service((200, body)).url, sample()).judge_error


def test_a_service_on_this_machine_is_not_asked_through_a_proxy(service, sample, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert judge(service((200, {"score": 1})).url, sample()).reward


def test_nobody_there(sample):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        url = f"http://user:secret@127.0.0.1:{s.getsockname()[1]}/x?key=secret"
    error = judge(url, sample(), max_retries=1).judge_error
    assert "ConnectError" in error and "after 2 tries" in error and "secret" not in error


@pytest.mark.timeout(20)
def test_a_service_that_never_answers(sample):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        assert "no result within 0.2 s" in judge(url, sample(), request_timeout=0.2).judge_error
