"""Settings, the missing extra, and the keys that are never shown."""

import sys
from typing import Any

import mambaslots.serve as serve_package
import pytest
from mambaslots.serve import ServerSettings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model_name": ""}, "model_name is ''; accepted: a string that is not empty"),
        ({"model_name": 3}, "model_name is 3; accepted: a str"),
        ({"host": " "}, "host is ' '"),
        ({"port": 65536}, "port is 65536; accepted: an integer from 0 to 65535"),
        ({"port": "80"}, "port is '80'"),
        ({"api_keys": ["k"]}, "api_keys is a list; accepted: a mapping of tenant to key"),
        ({"api_keys": {"": "k"}}, "api_keys has the tenant ''"),
        ({"api_keys": {"other": "k"}}, "api_keys has the tenant 'other'; accepted: a name that is not"),
        ({"api_keys": {"default": "k"}}, "api_keys has the tenant 'default'; accepted: a name that is not"),
        ({"api_keys": {"ann": ""}}, "api_keys: the key of tenant 'ann' is not accepted; accepted: visible"),
        ({"api_keys": {"ann": "clandestine key"}}, "the key of tenant 'ann' is not accepted"),
        ({"api_keys": {"ann": "k", "bob": "k"}}, "name a key twice"),
        ({"api_keys": {"ann": "k"}, "admin_key": "k"}, "name a key twice"),
        ({"admin_key": "clandestiné"}, "admin_key is not accepted"),
        ({"max_waiting_requests": 0}, "max_waiting_requests is 0; accepted: an integer from 1"),
        ({"max_body_bytes": 1.5}, "max_body_bytes is 1.5"),
        ({"body_timeout_s": 0}, "body_timeout_s is 0; accepted: a finite number from 0.001"),
        ({"request_timeout_s": 0}, "request_timeout_s is 0; accepted: a finite number from 0.001"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s is nan"),
        ({"trace": 1}, "trace is 1; accepted: True or False"),
        ({"allowed_origins": "https://a"}, "allowed_origins is 'https://a'; accepted: a list"),
        ({"allowed_origins": ["a"]}, "allowed_origins holds 'a'"),
        ({"allowed_hosts": "a"}, "allowed_hosts is 'a'; accepted: a list"),
        ({"allowed_hosts": 3}, "allowed_hosts is 3; accepted: a list"),
        ({"allowed_origins": {"https://a": 1}}, "allowed_origins is {'https://a': 1}; accepted: a list"),
        ({"allowed_hosts": ["http://a"]}, "allowed_hosts holds 'http://a'"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        ServerSettings(**({"model_name": "m"} | wrong))
    assert message in str(raised.value)
    assert "clandestin" not in str(raised.value)


def test_keys_are_not_shown() -> None:
    settings = ServerSettings(model_name="m", api_keys={"ann": "clandestine"}, admin_key="covert")
    assert "clandestine" not in repr(settings)
    assert "covert" not in repr(settings)


def test_without_the_extra_its_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = [name for name in sys.modules if name.startswith("mambaslots.serve.")]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(serve_package, name.rpartition(".")[2], raising=False)
    for name in ("fastapi", "starlette", "uvicorn", "prometheus_client"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("make_app", "serve"):
        monkeypatch.delitem(vars(serve_package), name, raising=False)
        with pytest.raises(ImportError, match="pip install 'mambaslots\\[serve\\]'"):
            getattr(serve_package, name)
