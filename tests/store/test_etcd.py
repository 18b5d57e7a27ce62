"""Client of a real etcd whose members end, stand still and come back."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from servers import serving

from distflow.errors import InvalidInput
from distflow.store import etcd as module
from distflow.store.etcd import EtcdStore
from distflow.store.interface import StoreUnavailable


def test_a_member_that_is_killed_is_not_noticed(etcd_of):
    """Whichever of three it is, also the one that is asked, and in the middle of a wait."""
    etcd = etcd_of(3)
    store = EtcdStore(etcd.address(), 60.0)
    assert store.add("count") == 1
    waiting = threading.Thread(target=lambda: store.wait(["late"], 60.0) and store.put("heard", ""))
    waiting.start()
    etcd.processes[store.local.member].kill()
    assert store.get("count") == "1"
    store.put("late", "")
    assert store.wait(["heard"], 60.0)
    waiting.join()
    assert store.put_if("leader", "a", None) == "a"


def test_without_a_majority_nothing_is_answered_and_afterwards_all_is_there(etcd_of):
    etcd = etcd_of(3)
    store = EtcdStore(etcd.address(), 60.0)
    store.put("kept", "1")
    for number in range(3):
        etcd.signal(number, signal.SIGSTOP)
    began = time.monotonic()
    with store.within(0.5), pytest.raises(StoreUnavailable, match="has not answered for") as error:
        store.get("kept")
    assert time.monotonic() - began < 10
    assert not error.value.gone
    for number in range(3):
        etcd.signal(number, signal.SIGCONT)
    assert store.get("kept") == "1"


def test_runs_of_one_etcd_know_nothing_of_each_other(etcd):
    one, other = (EtcdStore(etcd.address(run), 60.0) for run in ("a", "b"))
    one.put("key", "1")
    assert other.get("key") is None
    assert other.list("") == {}


@pytest.mark.parametrize("call", [lambda store, keys: store.put_all(dict.fromkeys(keys, "x")),
                                  lambda store, keys: store.delete(*keys), lambda store, keys: store.get_all(keys),
                                  lambda store, keys: store.has(*keys)], ids=["put_all", "delete", "get_all", "has"])
def test_one_deadline_holds_for_all_transactions_of_a_call(call):
    """Of a member that is slow to answer each of them, and never too slow for one."""
    answered = []

    class Slow(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            time.sleep(0.1)
            asked = len(json.loads(self.rfile.read(int(self.headers["Content-Length"]))).get("success", ()))
            answered.append(asked)
            self.send_response(200)
            self.end_headers()
            responses = [{"response_range": {"count": "1"}}] * asked
            self.wfile.write(json.dumps({"header": {"revision": "1"}, "responses": responses}).encode())

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Slow)) as server:
        store = EtcdStore(f"etcd://127.0.0.1:{server.server_port}/run", 60.0)
        call(store, [f"rank/{number}" for number in range(250)])
        assert answered == [0, 100, 100, 50]
        with store.within(0.5), pytest.raises(StoreUnavailable, match="has not answered for"):
            call(store, [f"rank/{number}" for number in range(10_000)])
        assert len(answered) <= 10, "a hundred of them would be whole"


@pytest.mark.parametrize("address", ["etcd://127.0.0.1:2379", "etcd://127.0.0.1/run", "etcd:///run"])
def test_an_address_without_a_run_or_a_port(address):
    with pytest.raises(InvalidInput, match="etcd://10.0.0.1:2379/grpo-1"):
        EtcdStore(address, 1.0)


def test_encrypted_connections_with_certificates_of_both_sides(etcd_of, tmp_path, monkeypatch):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days",
                    "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"], check=True,
                   capture_output=True)
    etcd = etcd_of(1, certificate=(cert, key))
    monkeypatch.setenv(module._CA, str(cert))
    monkeypatch.setenv(module._CERT, str(cert))
    monkeypatch.setenv(module._KEY, str(key))
    store = EtcdStore(etcd.address(), 60.0)
    store.put("key", "1")
    assert store.get("key") == "1"
    monkeypatch.delenv(module._CA)
    with pytest.raises(StoreUnavailable):
        EtcdStore(etcd.address(), 1.0)


def users(etcd) -> Callable[..., None]:
    """Have an etcd ask for passwords; return what changes its users then."""
    call = httpx.Client(base_url=f"http://127.0.0.1:{etcd.clients[0]}/v3/auth/")

    def change(path: str, **body: str) -> None:
        call.post(path, json=body).raise_for_status()

    change("user/add", name="root", password="a secret")
    change("role/add", name="root")
    change("user/grant", user="root", role="root")
    change("enable")
    root = call.post("authenticate", json={"name": "root", "password": "a secret"}).json()["token"]
    call.headers["Authorization"] = root
    return change


def test_users_and_their_passwords(etcd, monkeypatch):
    root = EtcdStore(etcd.address(), 60.0)
    users(etcd)
    with pytest.raises(StoreUnavailable, match="etcd refuses") as error:
        root.get("key")
    assert error.value.gone
    monkeypatch.setenv(module.USER, "root:wrong")
    with pytest.raises(InvalidInput, match="does not know the user `root`") as error:
        EtcdStore(etcd.address(), 60.0)
    assert "wrong" not in str(error.value)
    monkeypatch.setenv(module.USER, "root:a secret")
    store = EtcdStore(etcd.address(), 60.0)
    store.put("key", "1")
    assert store.get("key") == "1"


def test_a_change_of_users_makes_tokens_old(etcd_of, tmp_path, monkeypatch):
    """Those that etcd signs (JWT) have the revision of its users; it refuses them with another status than expired
    ones."""
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    subprocess.run(["openssl", "genrsa", "-out", private, "2048"], check=True, capture_output=True)
    subprocess.run(["openssl", "rsa", "-in", private, "-pubout", "-out", public], check=True, capture_output=True)
    etcd = etcd_of(1, tokens=f"jwt,pub-key={public},priv-key={private},sign-method=RS256,ttl=10m")
    EtcdStore(etcd.address(), 60.0)
    change = users(etcd)
    monkeypatch.setenv(module.USER, "root:a secret")
    store = EtcdStore(etcd.address(), 60.0)
    store.put("key", "1")
    change("user/add", name="another", password="a secret")
    assert store.get("key") == "1"


@pytest.mark.parametrize(("status", "text"), [(503, "<html>no backend</html>"),
                                              (429, '{"error": "etcdserver: too many requests"}')])
def test_a_member_that_cannot_check_a_user_now_is_passed_over(etcd, monkeypatch, status, text):
    EtcdStore(etcd.address(), 60.0)
    users(etcd)
    monkeypatch.setenv(module.USER, "root:a secret")

    class Unable(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Unable)) as proxy:
        store = EtcdStore(f"etcd://127.0.0.1:{proxy.server_port},127.0.0.1:{etcd.clients[0]}/run", 60.0)
        store.put("key", "1")
        assert store.get("key") == "1"
