"""A stand-in for an SGLang server on the loopback: a real tiny model behind the bodies that real servers send.

Shapes of requests and replies, and what happens on faults, were recorded from SGLang 0.5.23 (and 0.5.5 where they
differ). Unlike a real server it is up in milliseconds, and can be told to fail: `faults[path]` holds functions, each
used up by one request to that path. Such a function gets the handler and the request's body; it may answer by itself
(`reply`, `drop`, `hang`) and return True, or change what the model would answer (`edit`).
"""

import json
import socket
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.tiny_models import prompts, tiny
from trainer.rollout_engine import SGLangRolloutEngine

CONTEXT = 64
KEYS = [(1, 42, 0, 3), (1, 42, 0, 4), (1, 42, 0, 5)]  # of the three prompts of `roll`
SAMPLED: dict[tuple, tuple] = {}  # answers by weights, prompt and settings: the same question costs nothing twice


def reply(status: int, body, kind: str = "application/json"):
    """Fault: answer with this status and body (a text is sent as it is)."""
    return lambda handler, _: handler.send_body(status, body, kind)


def drop(handler, _):
    """Fault: close the connection without an answer, as a server does that dies."""
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)
    return True


def hang(seconds: float):
    """Fault: no answer for that long, then none at all."""

    def fault(handler, body):
        handler.server.stand_in.stopped.wait(seconds)
        return drop(handler, body)

    return fault


def slow(seconds: float):
    """Fault: the right answer, late."""
    return lambda handler, _: time.sleep(seconds)


def edit(change):
    """Fault: `change(results)` alters the list of results, or gives another one."""

    def fault(handler, _):
        handler.change = change

    return fault


class Handler(BaseHTTPRequestHandler):
    """One connection. Each request runs its fault, if there is one, then the route."""

    protocol_version = "HTTP/1.1"
    change = None

    def log_message(self, *_):
        pass

    def send_body(self, status: int, body, kind: str = "application/json") -> bool:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        return True

    def serve(self):
        stand_in = self.server.stand_in
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        stand_in.requests.append((self.path, body))
        self.change = None
        try:
            public = self.path == "/health"
            if stand_in.key and not public and self.headers.get("Authorization") != f"Bearer {stand_in.key_for(self)}":
                self.send_body(401, {"error": "Unauthorized"})
                return
            queue = stand_in.faults[self.path]
            if queue and queue.pop(0)(self, body):
                return
            route = stand_in.routes.get(self.path)
            status, content = route(self, body) if route else (404, {"detail": "Not Found"})
            self.send_body(status, content, "text/plain" if isinstance(content, str) else "application/json")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = serve


class HTTPServer(ThreadingHTTPServer):
    """Remembers its connections, so that they die with it."""

    daemon_threads, request_queue_size = True, 128

    def __init__(self, address, handler):
        self.connections = set()
        super().__init__(address, handler)

    def process_request(self, request, client_address):
        self.connections.add(request)
        super().process_request(request, client_address)

    def handle_error(self, request, client_address):
        """Broken connections are what this is for."""


class StandIn:
    """A server on a free port of 127.0.0.1 around `make_model()`, which gives its launch weights.

    Args: version: what it says it is (before 0.5.6 it has only the get_… information, before 0.5.1 no weight versions);
        original_logprob: report log-probs at temperature 1, as with SGLANG_RETURN_ORIGINAL_LOGPROB=1; deterministic:
        honour `sampling_seed`; key, admin_key: what it asks for; model_path: its launch folder.
    """

    def __init__(self, make_model, *, version="0.5.23", original_logprob=False, deterministic=True, key=None,
                 admin_key=None, model_path="/launch/folder", idle_seconds=None, updates=True):
        self.make_model, self.version, self.original_logprob = make_model, version, original_logprob
        self.deterministic, self.key, self.admin_key, self.launch_path = deterministic, key, admin_key, model_path
        self.updates, self.idle_seconds = updates, idle_seconds
        self.requests: list[tuple[str, object]] = []
        self.faults: dict[str, list] = defaultdict(list)
        self.port, self.server, self.draws, self.lock = 0, None, 0, threading.Lock()
        self.info = {}  # more fields for model_info
        numbers = tuple(int(part) for part in version.split("."))
        names = ("get_model_info", "get_server_info") if numbers < (0, 5, 6) else ("model_info", "server_info")
        self.has_versions = numbers >= (0, 5, 1)
        self.routes = {
            "/health": lambda *_: (200, ""), f"/{names[0]}": self.model_info,
            f"/{names[1]}": lambda *_: (200, {"version": version, "enable_deterministic_inference": deterministic}),
            "/v1/models": lambda *_: (200, {"object": "list", "data": [{"id": "m", "max_model_len": CONTEXT}]}),
            "/generate": self.generate, "/update_weights_from_disk": self.update,
            "/flush_cache": lambda *_: (200, "Cache flushed.\n"), "/abort_request": lambda *_: (200, ""),
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------ life
    def start(self) -> "StandIn":
        """Come up with the launch weights, at the port it had before if it had one."""
        self.model, self.weight_version, self.path = self.make_model().eval(), "default", self.launch_path
        self.stopped = threading.Event()
        handler = type("BoundHandler", (Handler,), {"timeout": self.idle_seconds})
        self.server = HTTPServer(("127.0.0.1", self.port), handler)
        self.server.stand_in, self.port = self, self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def kill(self) -> None:
        """Die as with kill -9: nothing listens, running requests get no answer."""
        if self.server is None:
            return
        self.stopped.set()
        server, self.server = self.server, None
        server.shutdown()
        server.server_close()
        for connection in server.connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    __enter__ = start

    def __exit__(self, *_):
        self.kill()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def key_for(self, handler) -> str:
        admin = handler.path in ("/update_weights_from_disk", "/flush_cache", "/abort_request")
        return (self.admin_key or self.key) if admin else self.key

    def bodies(self, path: str) -> list:
        """Bodies of the requests to `path` so far."""
        return [body for at, body in list(self.requests) if at == path]

    # ------------------------------------------------------------------------------------------ routes
    def model_info(self, *_):
        version = {"weight_version": self.weight_version} if self.has_versions else {}
        return 200, {"model_path": self.path, "tokenizer_path": self.launch_path, "is_generation": True,
                     "preferred_sampling_params": None, **version, **self.info}

    def generate(self, handler, body):
        nested = isinstance(body["input_ids"][0], list)
        rows = body["input_ids"] if nested else [body["input_ids"]]
        settings = body["sampling_params"]
        vocabulary = self.model.config.vocab_size
        for row in rows:
            if any(not 0 <= token < vocabulary for token in row):
                threading.Thread(target=self.kill).start()  # a real server dies as a whole
                drop(handler, body)
                raise ConnectionResetError
            if len(row) + settings["max_new_tokens"] > CONTEXT:
                return 400, {"error": {"message": "Requested token count exceeds the model's maximum context length of "
                                                  f"{CONTEXT} tokens."}}
        with self.lock:
            results = [self.sample(row, settings) for row in rows]
        if handler.change is not None:
            results = handler.change(results)
        return 200, results if nested else results[0]

    def sample(self, prompt, settings) -> dict:
        self.draws += 1
        seed = settings.get("sampling_seed", 42) if self.deterministic else self.draws
        weights = b"".join(tensor.numpy().tobytes() for tensor in self.model.state_dict().values())
        key = (hash(weights), self.original_logprob, seed, tuple(prompt), json.dumps(settings))
        if key not in SAMPLED:
            SAMPLED[key] = self.decode(prompt, settings, torch.Generator().manual_seed(seed))
        entries, stop = SAMPLED[key]
        return self.result([list(entry) for entry in entries], stop, len(prompt))

    @torch.no_grad()
    def decode(self, prompt, settings, draw) -> tuple[list, int | None]:
        """(entries [[log-prob, id, None], …], the stop token it ended with or None)."""
        temperature = settings["temperature"]
        ids, entries, stop = list(prompt), [], None
        while len(entries) < settings["max_new_tokens"] and stop is None:
            logits = self.model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1].float()
            tempered = logits / temperature if temperature else logits
            token = logits.argmax() if temperature == 0 else tempered.softmax(-1).multinomial(1, generator=draw)[0]
            logps = (logits if self.original_logprob else tempered).log_softmax(-1)
            ids.append(int(token))
            entries.append([logps[token].item(), int(token), None])
            if int(token) in settings["stop_token_ids"] and not settings["ignore_eos"]:
                stop = int(token)
        return entries, stop

    def result(self, entries, stop, prompt_tokens: int) -> dict:
        """A result as 0.5.23 sends it, for entries [[log-prob, id, None], ...]."""
        finish = {"type": "length", "length": len(entries)} if stop is None else {"type": "stop", "matched": stop}
        version = {"weight_version": self.weight_version} if self.has_versions else {}
        return {"text": "", "output_ids": [entry[1] for entry in entries],
                "meta_info": {"id": "e0f1", "finish_reason": finish, "prompt_tokens": prompt_tokens, **version,
                              "completion_tokens": len(entries), "cached_tokens": 0, "num_retractions": 0,
                              "input_token_logprobs": [], "output_token_logprobs": entries,
                              "output_token_logprobs_length": len(entries), "dp_rank": None, "e2e_latency": 0.01}}

    def update(self, handler, body):
        folder = Path(body["model_path"])
        if not folder.is_dir():
            return 400, {"success": False, "message": "Failed to get weights iterator: Repo id must be in the form "
                                                      f"'repo_name': '{folder}'", "num_paused_requests": 0}
        state = load_file(folder / "model.safetensors")
        if self.updates:
            with self.lock:
                self.model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=True)
        self.path = str(folder)
        if self.has_versions and body.get("weight_version"):
            self.weight_version = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


# ---------------------------------------------------------------------------------------------- the other side
def build_engine(tokenizer, shared: Path, *servers: StandIn, **settings) -> SGLangRolloutEngine:
    """An engine of these stand-ins, quick to try again."""
    settings = {"timeout": 5.0, "backoff": 0.01, "wait": 5.0, **settings}
    return SGLangRolloutEngine(",".join(s.url for s in servers), None, str(shared), tokenizer=tokenizer, **settings)


def roll(engine, *, generations=2, tokens=6, temperature=0.8, **settings):
    """Answers to three short prompts with fixed keys."""
    ids, mask = prompts()
    return engine.rollout(ids, mask, generations, tokens, temperature, prompt_keys=KEYS, **settings)


def changed(seed: int = 5):
    """The tiny model with other weights."""
    model = tiny()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model
