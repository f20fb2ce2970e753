"""What may be a secret is not shown, and the rest is."""

import pytest

from xtuner.v1.utils.secrets import is_harmless_variable, is_secret, without_secrets


@pytest.mark.parametrize(
    "name",
    [
        "api_key", "api-keys", "apikey", "AWS_SECRET_ACCESS_KEY", "OPENAI_KEY", "PRIVATE_KEY", "DB_PASSWD", "db_pass",
        "password", "hf_token", "vllm_hf-token", "HF_TOKENS", "client_secret_value", "CREDENTIALS_JSON", "basic_auth",
    ],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "max_num_batched_tokens", "min_tokens", "eos_token_id", "keyfile", "bypass", "author", "env", "x"],
)
def test_names_of_other_things(name):
    assert not is_secret(name)


def test_variables_that_concern_a_run_are_shown_unless_a_word_in_them_warns():
    assert is_harmless_variable("NCCL_DEBUG") and is_harmless_variable("WORK_DIR")
    assert not any(map(is_harmless_variable, ("HOME", "VLLM_X", "RAY_AUTH_TOKEN", "NCCL_key", "XTUNER_REDIS_PASS")))


def test_text_under_secret_names_is_hidden():
    config = {"rollout": {"api_key": ["k1", "k2"], "eos_token": 3, "password": None}, "max_tokens": 8, "hf_token": "t"}
    assert without_secrets(config) == {
        "rollout": {"api_key": ["(hidden)", "(hidden)"], "eos_token": 3, "password": None},
        "max_tokens": 8, "hf_token": "(hidden)",
    }  # fmt: skip
    assert without_secrets({"credentials": {"user": "me", "port": 3}, "max-token-ids": "5"}) == {
        "credentials": {"user": "(hidden)", "port": 3}, "max-token-ids": "5",
    }  # fmt: skip


def test_variables_of_a_mapping_are_hidden_unless_they_are_harmless():
    """Nobody can tell which of them is a secret: DATABASE holds one as well as DB_PASSWD."""
    env = {"DB_PASSWD": "p", "DATABASE": "p", "PIN": 12, "NCCL_DEBUG": "INFO", "NCCL_KEY": "p"}
    shown = dict.fromkeys(env, "(hidden)") | {"NCCL_DEBUG": "INFO"}
    assert without_secrets({"extra": {"vllm_env": env, "env": env, "envy": {"DATABASE": "d"}}, "env": "label"}) == {
        "extra": {"vllm_env": shown, "env": shown, "envy": {"DATABASE": "d"}}, "env": "label",
    }  # fmt: skip


def test_passwords_in_a_url_are_hidden():
    assert without_secrets("http://me:pw@host:8/a?n=3&api_key=k#x") == "http://(hidden)@host:8/a?n=3&api_key=(hidden)#x"
    for plain in ("http://host/a@b?n=3", "me@host", "a?key=b"):
        assert without_secrets(plain) == plain
