"""One SGLang server over HTTP: what is asked, how often it is asked again, and what counts as an answer.

Written for SGLang 0.4.9 to 0.5.23; older servers (from 0.4.3) work without weight versions. Token ids and log-probs are
taken from `meta_info.output_token_logprobs` and from nowhere else. An answer that is not exactly what was asked for is
an error that names the request; nothing is padded, shifted or filled in.
"""

import math
import os
import re
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import requests

from trainer.distributed import Logger

CONNECT_SECONDS = 10.0
HEALTH_SECONDS = 25.0  # the server's own check generates a token and may take 20 s
SECONDS_A_TOKEN = 0.25  # added to the timeout for every token that may be generated
UPDATE_SECONDS = 600.0  # at least: a weight update waits for running requests
ATTEMPTS = 4  # of a request that meets a broken connection or a 5xx
TIMEOUT_ATTEMPTS = 2  # of one that meets silence


class ServerError(RuntimeError):
    """The server answered, but not with what was asked for; asking again would not help."""


class ServerLost(RuntimeError):
    """The server is gone, starting, or holds other weights: wait for it, send the weights, repeat the step."""

    def __init__(self, server: "SGLangServer", problem: str):
        super().__init__(f"{server.url}: {problem}")
        self.server = server


class Sampling(NamedTuple):
    """How answers are drawn; temperature 0 = greedy, top_k 0 and top_p 1 = off."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    end_ids: tuple[int, ...]  # each ends an answer
    ignore_eos: bool = False


class Job(NamedTuple):
    """One answer that is wanted; `name` says in errors which one."""

    name: str
    prompt: list[int]
    seed: int
    sampling: Sampling


class Answer(NamedTuple):
    """Sampled ids, the end token included, and their log-probs as the server reports them."""

    ids: list[int]
    logps: list[float]


def is_loopback(url: str) -> bool:
    """True for a server on this machine, which no proxy of the environment can reach."""
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def error_text(response: requests.Response, limit: int = 600) -> str:
    """What a failed reply says; the server has four shapes of error bodies, and plain text."""
    try:
        body = response.json()
    except ValueError:
        return response.text[:limit] or "no text"
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(key):
            inner = body[key]
            return str(inner.get("message", inner) if isinstance(inner, dict) else inner)[:limit]
    return str(body)[:limit]


class SGLangServer:
    """Connections to one server.

    Args: url as http://host:port; timeout: seconds that a short request may take; connections kept open at once;
        backoff: seconds before the second attempt, doubled each time.
    The keys in SGLANG_API_KEY and SGLANG_ADMIN_API_KEY (weights and cache; default: the same) are sent as Bearer.
    """

    def __init__(self, url: str, *, timeout: float = 120.0, connections: int = 64, backoff: float = 0.25):
        self.url, self.timeout, self.backoff = url.rstrip("/"), timeout, backoff
        if not re.fullmatch(r"https?://([^/:\s\[]+|\[[0-9a-fA-F:]+\])(:\d{1,5})?(/\S*)?", self.url):
            raise ValueError(f"SGLang server {url!r}: expected http://host:port (--sglang_base_url)")
        self.session = requests.Session()
        # A proxy from the environment would be asked for 127.0.0.1 and answer with its own 502.
        self.session.trust_env = not is_loopback(self.url)
        self.session.mount(f"{urlsplit(self.url).scheme}://", requests.adapters.HTTPAdapter(pool_maxsize=connections))
        self.key = os.environ.get("SGLANG_API_KEY")
        self.admin_key = os.environ.get("SGLANG_ADMIN_API_KEY") or self.key
        self.known = False  # whether it has been asked for what follows
        self.context: int | None = None  # longest prompt + answer in tokens, where the server says so
        self.takes_seeds = True
        self.sent_version: str | None = None  # of the weights it was last given by us

    # ------------------------------------------------------------------------------------------ requests
    def _send(self, method: str, path: str, body: dict | None, seconds: float, key: str | None) -> requests.Response:
        def authorize(request):
            if key:
                request.headers["Authorization"] = f"Bearer {key}"
            return request

        return self.session.request(method, self.url + path, json=body, timeout=(CONNECT_SECONDS, seconds),
                                    auth=authorize)  # fmt: skip

    def request(self, method: str, path: str, body: dict | None = None, *, seconds: float | None = None,
                admin: bool = False) -> requests.Response:
        """The reply, unless it is a 5xx; broken connections and 5xx are tried again, a 4xx never.

        Raises: ServerLost if the server is not there or says 503, ServerError for another 5xx or no answer in time.
        """
        seconds = self.timeout if seconds is None else seconds
        problem, lost, silent = "", False, 0
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(self.backoff * 2 ** (attempt - 1))
            try:
                response = self._send(method, path, body, seconds, self.admin_key if admin else self.key)
            except requests.exceptions.ReadTimeout as error:
                silent += 1
                if silent == TIMEOUT_ATTEMPTS:
                    raise ServerError(
                        f"{self.url}{path}: no answer in {seconds:.0f} s, {silent} times: the server hangs, is paused "
                        "(/continue_generation wakes it), or needs a longer timeout"
                    ) from error
                continue
            except (requests.exceptions.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
                problem, lost = f"{path}: {_short(error)}", True
                continue
            if response.status_code < 500 or response.status_code == 501:  # 501: it will never know this path
                return response
            problem, lost = f"{path}: HTTP {response.status_code}: {error_text(response)}", response.status_code == 503
        if lost:
            self.forget()
            raise ServerLost(self, problem)
        raise ServerError(f"{self.url}{problem}")

    def _json(self, response: requests.Response, what: str):
        """The body of a 200. Raises ServerError for any other status, or a body that is not JSON."""
        if response.status_code in (401, 403):
            raise ServerError(f"{self.url}: {what}: HTTP {response.status_code}: {error_text(response)}; set "
                              "SGLANG_API_KEY to the key the server was launched with")
        if response.status_code != 200:
            raise ServerError(f"{self.url}: {what}: HTTP {response.status_code}: {error_text(response)}")
        try:
            return response.json()
        except ValueError as error:
            raise ServerError(f"{self.url}: {what}: HTTP 200, but not JSON: {response.text[:200]!r}") from error

    def _ask(self, *paths: str) -> dict:
        """The JSON object at the first of `paths` that this server knows; {} if it knows none."""
        for path in paths:
            response = self.request("GET", path)
            if response.status_code in (401, 403):
                self._json(response, path)
            if response.status_code == 200:
                try:
                    body = response.json()
                except ValueError:
                    continue
                return body if isinstance(body, dict) else {}
        return {}

    # ------------------------------------------------------------------------------------------ state
    def healthy(self) -> bool:
        """True if the server answers its health check with 200."""
        try:
            return self._send("GET", "/health", None, HEALTH_SECONDS, None).status_code == 200
        except requests.exceptions.RequestException:
            return False

    def wait_until_ready(self, seconds: float, launch: str) -> None:
        """Return once the health check succeeds; a line every 10 s meanwhile.

        Raises: RuntimeError after `seconds`, with the command that launches the server.
        """
        began = told = time.monotonic()
        while not self.healthy():
            now = time.monotonic()
            if now - began >= seconds:
                raise RuntimeError(f"no SGLang server answers at {self.url} (waited {seconds:.0f} s, --sglang_wait): "
                                   f"start one with: {launch}")
            if told == began or now - told >= 10:
                Logger(f"waiting for the SGLang server at {self.url}: {now - began:.0f} of {seconds:.0f} s")
                told = now
            time.sleep(min(1.0, 4 * self.backoff))

    def forget(self) -> None:
        """It may come back as another process: nothing that was known of it holds."""
        self.sent_version, self.known = None, False

    def learn(self) -> dict:
        """What the server says of itself (server and model information merged, {} if nothing); sets `context`."""
        info = {**self._ask("/server_info", "/get_server_info"), **self._ask("/model_info", "/get_model_info")}
        models = self._ask("/v1/models").get("data")
        if isinstance(models, list) and models and isinstance(models[0], dict):
            length = models[0].get("max_model_len")
            self.context = length if isinstance(length, int) and length > 0 else None
        # Before 0.5.3 an unknown sampling parameter is an internal server error.
        self.takes_seeds, self.known = _version_numbers(info.get("version")) >= (0, 5, 3), True
        return info

    def holds(self, version: str, folder: Path) -> bool:
        """Whether the server has these weights: by its weight version, else by its model path, else by our memory."""
        info = self._ask("/model_info", "/get_model_info")
        if info.get("weight_version") is not None:
            return info["weight_version"] == version
        if info.get("model_path") is not None:
            return Path(info["model_path"]) == folder
        return self.sent_version == version

    def update_weights(self, folder: Path, version: str) -> None:
        """Load the weights in `folder`, empty the cache, and check that the server has them.

        Raises: ServerError if it refuses or still has others; ServerLost if it goes away meanwhile.
        """
        body = {"model_path": str(folder), "load_format": "auto", "abort_all_requests": True,
                "weight_version": version, "flush_cache": True}  # fmt: skip
        response = self.request("POST", "/update_weights_from_disk", body, seconds=max(self.timeout, UPDATE_SECONDS),
                                admin=True)  # fmt: skip
        what = f"loading the weights {folder}"
        if response.status_code == 400 and "cache was not flushed" in response.text:
            # The new weights are live already, and the old cache with them.
            if not self.flush_cache():
                raise ServerError(f"{self.url}: {what}: the weights are loaded, but the old cache cannot be flushed")
        elif response.status_code == 400:
            raise ServerError(f"{self.url}: {what}: {error_text(response)}; the server must see this path under this "
                              "name (--sglang_shared_path), and its model must be the one being trained")
        else:
            reply = self._json(response, what)
            if not isinstance(reply, dict) or reply.get("success") is not True:
                raise ServerError(f"{self.url}: {what}: HTTP 200, but success is not true: {str(reply)[:300]}")
        self.sent_version = version
        if not self.holds(version, folder):
            raise ServerError(f"{self.url}: {what}: it reported success, but does not have version {version}; another "
                              "program may be updating the same server")

    def flush_cache(self, attempts: int = 20) -> bool:
        """Empty the prefix cache; the server refuses while requests run, so it is asked several times."""
        for attempt in range(attempts):
            if attempt:
                time.sleep(2 * self.backoff)
            if self.request("POST", "/flush_cache", admin=True).status_code == 200:
                return True
        return False

    def abort_all(self) -> None:
        """End requests that nobody waits for any more; what comes of it does not matter."""
        try:
            self._send("POST", "/abort_request", {"abort_all": True}, 5.0, self.admin_key)
        except requests.exceptions.RequestException as error:
            Logger(f"{self.url}: running requests could not be ended: {_short(error)}")

    # ------------------------------------------------------------------------------------------ generating
    def room(self, job: Job) -> int:
        """Tokens the answer may have: what was asked for, or what the server's context leaves.

        Raises: ValueError naming the request if it leaves none.
        """
        if self.context is None:
            return job.sampling.max_new_tokens
        left = self.context - len(job.prompt)
        if left < 1:
            raise ValueError(f"{job.name}: {len(job.prompt)} prompt tokens leave no room for an answer in the server's "
                             f"context of {self.context}; lower --max_seq_len or launch with a longer --context-length")
        return min(job.sampling.max_new_tokens, left)

    def generate(self, job: Job, vocab_size: int, version: str | None = None) -> Answer:
        """One sampled answer; with `version`, by weights of that version.

        Raises: ServerError naming the request for anything but a whole answer; ServerLost if the server is gone or has
        other weights.
        """
        room, sampling = self.room(job), job.sampling
        # Every parameter is sent: --preferred-sampling-params of the server would fill in what is missing.
        settings = {
            "max_new_tokens": room, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
            "presence_penalty": 0.0, "min_new_tokens": 0, "stop_token_ids": list(sampling.end_ids), "n": 1,
            "ignore_eos": sampling.ignore_eos, "skip_special_tokens": False, "spaces_between_special_tokens": False,
            "no_stop_trim": True,
        }  # fmt: skip
        if self.takes_seeds:
            settings["sampling_seed"] = job.seed
        body = {"input_ids": [job.prompt], "sampling_params": settings, "return_logprob": True, "stream": False}
        response = self.request("POST", "/generate", body, seconds=self.timeout + SECONDS_A_TOKEN * room)
        reply = self._json(response, job.name)
        results = reply if isinstance(reply, list) else [reply]
        if len(results) != 1:
            raise ServerError(f"{self.url}: {job.name}: {len(results)} results came back, 1 was asked for")
        try:
            answer = read_answer(results[0], room, vocab_size, sampling)
        except ValueError as error:
            raise ServerError(f"{self.url}: {job.name}: {error}") from error
        served = results[0]["meta_info"].get("weight_version")
        if version is not None and served not in (None, version):
            info = self._ask("/model_info", "/get_model_info")
            if info.get("weight_version") != version:
                self.forget()
                raise ServerLost(self, f"{job.name} was answered by weights {served!r}, not by {version!r}")
        return answer


def read_answer(result, max_new_tokens: int, vocab_size: int, sampling: Sampling) -> Answer:
    """Ids and log-probs of one result of /generate.

    Raises: ValueError that says what is wrong: not an object, aborted, no log-probs, counts that differ, an id outside
    the vocabulary, a log-prob that is null, not finite or above 0, no tokens, too many, or a stop that is not ours.
    """
    meta = result.get("meta_info") if isinstance(result, dict) else None
    if not isinstance(meta, dict):
        raise ValueError(f"no meta_info in the result: {str(result)[:200]}")
    finish = meta.get("finish_reason")
    kind = finish.get("type") if isinstance(finish, dict) else finish
    if kind not in ("stop", "length"):
        raise ValueError(f"the answer is not whole: finish_reason {finish}, expected stop or length")
    entries = meta.get("output_token_logprobs")
    if not isinstance(entries, list):
        raise ValueError("no output_token_logprobs in meta_info: the server gives text only, and tokens cannot be told "
                         "from text")
    if not entries:
        raise ValueError("the answer is empty: output_token_logprobs has no entries")
    if any(not isinstance(entry, (list, tuple)) or len(entry) < 2 for entry in entries):
        raise ValueError("an entry of output_token_logprobs is not [log-prob, id, …]")
    logps, ids = [entry[0] for entry in entries], [entry[1] for entry in entries]
    for name, value in (("completion_tokens", meta.get("completion_tokens")),
                        ("output_ids", _length(result.get("output_ids")))):  # fmt: skip
        if value is not None and value != len(ids):
            raise ValueError(f"{len(ids)} log-probs came back, but {name} says {value} tokens")
    _check_ids(ids, result.get("output_ids"), vocab_size)
    for j, logp in enumerate(logps):
        if isinstance(logp, bool) or not isinstance(logp, (int, float)) or not math.isfinite(logp) or logp > 1e-3:
            raise ValueError(f"log-prob {j} of {len(logps)} is {logp}: expected a finite number of at most 0; weights "
                             "with NaN give this")
    if len(ids) > max_new_tokens:
        raise ValueError(f"{len(ids)} tokens came back, at most {max_new_tokens} were asked for")
    matched = finish.get("matched") if isinstance(finish, dict) else None
    if kind == "stop" and matched is not None and matched not in sampling.end_ids:
        raise ValueError(f"the server stopped at {matched!r}, but the trainer's end token is "
                         f"{' or '.join(map(str, sampling.end_ids))}: launch it with the folder that "
                         "scripts/convert_model.py wrote, or that --hf_model names")
    return Answer(ids, [float(logp) for logp in logps])


def _check_ids(ids: list, output_ids, vocab_size: int) -> None:
    for j, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(f"token {j} is {token!r}: expected an id from 0 to {vocab_size - 1}; the server has "
                             "another vocabulary")
    if output_ids is not None and list(output_ids) != ids:
        raise ValueError(f"output_ids {str(output_ids)[:80]} and the ids beside the log-probs {str(ids)[:80]} differ")


def _length(value) -> int | None:
    return len(value) if isinstance(value, list) else None


def _version_numbers(version) -> tuple[int, ...]:
    """(0, 5, 23) of "0.5.23.post1"; larger than any version if it is not known."""
    if not isinstance(version, str) or not version[:1].isdigit():
        return (10**6,)
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _short(error: Exception) -> str:
    """The kind of a connection error and its reason, without the object addresses that requests prints."""
    reason = getattr(error.args[0] if error.args else None, "reason", None) or error
    return f"{type(error).__name__}: {str(reason).rpartition('>: ')[2] or reason}"[:300]
