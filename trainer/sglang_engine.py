"""Answers from SGLang servers, with the trainer's weights pushed to them after every update.

    python scripts/convert_model.py out/full_sft_768.pth minimind-qwen3
    python -m sglang.launch_server --model-path minimind-qwen3 --port 8998 --dtype bfloat16
    python trainer/train_grpo.py --rollout_engine sglang --sglang_base_url http://localhost:8998

Tokens go in and tokens come out: texts are never encoded again. Only rank 0 talks to the servers; it gets all ranks'
prompts and hands the answers back, so all ranks must call `rollout`, `start`, `update_policy` and `sync` together, and
an error on rank 0 is raised on all of them. The client of one server is in sglang_client.py, the weights on disk in
sglang_weights.py.

Letters: B prompts, G answers a prompt, N = B·G rows, P prompt width, R answer width.
"""

import datetime
import threading
from collections.abc import Callable, Iterable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.export import read_json
from trainer.distributed import Logger, rank_and_world, unwrap_model
from trainer.rl_math import mask_until_eos
from trainer.rollout_engine import RolloutEngine, RolloutResult, answer_ends, answer_keys, decode_texts, has_ended
from trainer.sglang_checks import check_launch_folder, check_server, probe_server
from trainer.sglang_client import Answer, Job, Sampling, ServerLost, SGLangServer
from trainer.sglang_weights import WeightVersions

RECOVERIES = 3  # times that one rollout or update waits for a server to return


class RankPrompts(NamedTuple):
    """What one rank wants answered."""

    prompts: list[list[int]]
    seeds: list[int]  # one a row, N
    num_generations: int
    sampling: Sampling


def server_urls(base_url: str) -> list[str]:
    """The comma-separated URLs of --sglang_base_url. Raises ValueError if there is none, or one twice."""
    urls = [url.strip().rstrip("/") for url in base_url.split(",") if url.strip()]
    if not urls or len(set(urls)) != len(urls):
        raise ValueError(f"--sglang_base_url {base_url!r}: expected http://host:port, or several different ones with "
                         "commas between")
    return urls


def sampling_seed(key: tuple[int, ...]) -> int:
    """A 31-bit seed for the server from a row's key; equal keys, equal seeds."""
    return int(np.random.SeedSequence(key).generate_state(1)[0]) & 0x7FFFFFFF


class SGLangRolloutEngine(RolloutEngine):
    """Samples from one or more SGLang servers.

    Args: base_url: http://host:port, several with commas between (prompts are spread over them, all get the weights);
        model_path: the folder they were launched with, as `scripts/convert_model.py` writes it: its tokenizer and sizes
        are used, and it stands in error messages; shared_ckpt_path: a folder that trainer and servers see under one
        name; timeout: seconds for a short request, generating may take 0.25 s a token more.
    Keyword-only: tokenizer (default: the one in model_path); device of the results (default: the prompts'); dtype the
        weights are sent in, float32 or bfloat16; concurrency: requests in flight, over all servers; wait: seconds to
        wait for a server that is not there (default: timeout); sync_interval: push at every so many update_policy
        calls; recompute_logps "auto", "0" or "1", see `must_recompute`; backoff: seconds before a second attempt.
    Seeds: every row sends a `sampling_seed` that follows from its prompt key. Servers use it only when launched with
    --enable-deterministic-inference; without that flag a repeated run samples other tokens.
    Nothing is sent before the first call. `start(model)` checks the servers; the scripts call it at once.
    """

    def __init__(self, base_url: str, model_path: str | None = None, shared_ckpt_path: str = "./sglang_ckpt",
                 timeout: float = 120.0, *, tokenizer=None, device=None, dtype: str = "float32", concurrency: int = 64,
                 wait: float | None = None, sync_interval: int = 1, recompute_logps: str = "auto",
                 backoff: float = 0.25):
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype {dtype!r}: weights are sent as float32 or bfloat16")
        if recompute_logps not in ("auto", "0", "1"):
            raise ValueError(f"--recompute_logps {recompute_logps!r}: expected auto, 0 or 1")
        self.servers = [SGLangServer(url, timeout=timeout, connections=concurrency, backoff=backoff)
                        for url in server_urls(base_url)]
        self.model_path, self.device, self.concurrency = model_path, device, concurrency
        self.wait = timeout if wait is None else wait
        self.sync_interval, self.recompute_logps = sync_interval, recompute_logps
        self.tokenizer = tokenizer or _tokenizer_of(model_path)
        self.logp_convention = "unknown"  # or "sampling" (divided by the sampling temperature), or "one" (by 1)
        self.vocab_size = _vocabulary_of(model_path) or len(self.tokenizer)
        self.versions = WeightVersions(Path(shared_ckpt_path), dtype)
        self._policy: nn.Module | None = None
        self.end_ids = (self.tokenizer.eos_token_id,)
        self._pushes = self._withheld = 0  # versions sent; update_policy calls since the last
        self._group = None

    # ------------------------------------------------------------------------------------------ health
    def health(self) -> bool:
        """True if every server answers its health check. Asks from this process; no other rank takes part."""
        return all(server.healthy() for server in self.servers)

    def flush_cache(self) -> bool:
        """True if every server emptied its prefix cache. Asks from this process; no other rank takes part."""
        return all([server.flush_cache() for server in self.servers])

    def launch_command(self, server: SGLangServer) -> str:
        """What starts a server that this engine can use."""
        port = urlsplit(server.url).port or 30000
        return (f"python -m sglang.launch_server --model-path {self.model_path or 'MODEL_FOLDER'} --port {port} "
                f"--dtype {self.versions.dtype}")

    # ------------------------------------------------------------------------------------------ ranks
    def _together(self, work: Callable[[list], list], mine):
        """Rank 0 runs `work` on the list of every rank's `mine`; each rank gets its entry of the list that comes back.

        Raises on every rank what `work` raised on rank 0 (ValueError as itself, all else as RuntimeError).
        """
        rank, world = rank_and_world()
        if world == 1:
            return work([mine])[0]
        if self._group is None:
            # Objects travel over gloo, which also a long wait for a server does not time out.
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=2))
        gathered = [None] * world if rank == 0 else None
        dist.gather_object(mine, gathered, dst=0, group=self._group)
        outcome: list = [None]
        error: Exception | None = None
        if rank == 0:
            try:
                outcome = [(work(gathered), None)]
            except Exception as caught:  # noqa: BLE001 - whatever it is, the other ranks must not wait for ever
                error = caught
                outcome = [(None, (isinstance(caught, ValueError), str(caught)))]
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if error is not None:
            raise error
        results, failure = outcome[0]
        if failure is not None:
            raise ValueError(failure[1]) if failure[0] else RuntimeError(failure[1])
        return results[rank]

    def _on_main(self, work: Callable[[], object]):
        """`work()` on rank 0; what it gives, or raises, on every rank."""
        return self._together(lambda everyone: [work()] * len(everyone), None)

    # ------------------------------------------------------------------------------------------ weights
    def start(self, model: nn.Module) -> None:
        """Wait for the servers, check that they serve this model, push the weights, and measure their log-probs.

        Raises: RuntimeError or ValueError, on every rank, that says which server does not fit and why.
        """
        self._on_main(lambda: self._connect(model))
        self.update_policy(model)
        self.logp_convention = self._on_main(lambda: self._probe(model))

    def update_policy(self, model: nn.Module) -> None:
        """Sample from these weights from now on: at every `sync_interval`-th call they are pushed before it returns.

        Raises: ValueError or RuntimeError on every rank; the servers then still have the weights of before.
        """
        self._policy, self.end_ids = model, tuple(answer_ends(model, self.tokenizer))
        self._withheld += 1
        if self._pushes == 0 or self._withheld >= self.sync_interval:
            self.sync()

    def sync(self) -> None:
        """Push the weights that `update_policy` was last given and has withheld, if it has."""
        if self._policy is None or self._withheld == 0:
            return
        self._pushes = self._on_main(self._push)
        self._withheld = 0

    def _push(self) -> int:
        self.versions.add(self._policy)
        self.vocab_size = unwrap_model(self._policy).config.vocab_size
        self._with_recovery(self._refresh)
        return self.versions.number

    def _refresh(self) -> None:
        """Get to know every server, and give it the newest version unless it has it (a restarted one does not)."""

        def give(server: SGLangServer) -> None:
            if not server.known:
                server.learn()
            if version is not None and not server.holds(version, folder):
                if server.sent_version == version:
                    Logger(f"{server.url} has lost its weights (restarted?): version {version} is sent again")
                server.update_weights(folder, version)

        version, folder = self.versions.version, self.versions.folder
        self._in_parallel(give, self.servers)

    def _with_recovery(self, action: Callable):
        """`action()`; when a server is lost meanwhile, wait until it is back and do it again, as a whole.

        As a whole: answers that were done before the server died are the shorter ones, and keeping them would tilt the
        sample towards short answers.
        """
        gone: SGLangServer | None = None
        for attempt in range(RECOVERIES + 1):
            try:
                if gone is not None:
                    gone.wait_until_ready(self.wait, self.launch_command(gone))
                return action()
            except ServerLost as lost:
                if attempt == RECOVERIES:
                    raise RuntimeError(f"{lost}; it was lost {attempt + 1} times in this step: see its log") from lost
                Logger(f"{lost}; once it answers again its weights are sent and the step is repeated")
                gone = lost.server

    def _in_parallel(self, work: Callable, items: Iterable) -> list:
        """Results of `work(item)`, in order; after an error nothing more is begun, and it is raised at once."""
        items, failed = list(items), threading.Event()

        def numbered(pair: tuple):
            if failed.is_set():
                return pair[0], None
            try:
                return pair[0], work(pair[1])
            except BaseException:
                failed.set()
                raise

        results = [None] * len(items)
        # Leaving the pool does not wait for requests that are still running, so neither an error nor Ctrl-C hangs.
        with ThreadPool(max(1, min(self.concurrency, len(items)))) as pool:
            for index, result in pool.imap_unordered(numbered, enumerate(items)):
                results[index] = result
        return results

    # ------------------------------------------------------------------------------------------ checks at start
    def _connect(self, model: nn.Module) -> None:
        """Wait for every server and compare what it serves with the model, before weights are sent that would kill it.

        Raises: RuntimeError if a server does not come up, ValueError if it serves another model.
        """
        config = unwrap_model(model).config
        check_launch_folder(self.model_path, config, "--sglang_model_path")
        for server in self.servers:
            server.wait_until_ready(self.wait, self.launch_command(server))
            self._with_recovery(lambda s=server: check_server(s, config))

    def _probe(self, model: nn.Module) -> str:
        """How the servers report log-probs; see `probe_server`. Raises ValueError if they differ in that."""

        def probe(server: SGLangServer) -> str:
            self._refresh()
            return probe_server(server, model, self.end_ids, self.versions.version)

        found = {server.url: self._with_recovery(lambda s=server: probe(s)) for server in self.servers}
        if len(set(found.values())) > 1:
            raise ValueError(f"the servers report log-probs at different temperatures: {found}; launch all of them "
                             "with SGLANG_RETURN_ORIGINAL_LOGPROB, or none")
        return next(iter(found.values()))

    def logps_temperature(self, temperature: float, logp_temperature: float | None = None) -> float | None:
        """What logits were divided by in the log-probs of answers sampled at `temperature`; None if not known."""
        if temperature == 0:
            return 1.0
        return {"sampling": temperature, "one": 1.0}.get(self.logp_convention)

    def must_recompute(self, temperature: float, logp_temperature: float) -> bool:
        """Whether the trainer has to score answers sampled at `temperature` itself to have log-probs at its own.

        "1": always; "auto": where the server's are at another temperature or not known; "0": never.
        Raises: ValueError if that is forbidden ("0") and needed.
        """
        known = self.logps_temperature(temperature)
        if self.recompute_logps == "0" and known not in (None, logp_temperature):
            raise ValueError(f"--recompute_logps 0: the servers' log-probs are at temperature {known:g}, the trainer's "
                             f"at {logp_temperature:g} (--logp_temperature); make them equal or leave it at auto")
        if self.recompute_logps == "auto":
            return known != logp_temperature
        return self.recompute_logps == "1"

    # ------------------------------------------------------------------------------------------ rollout
    def rollout(self, prompt_ids: Tensor, attention_mask: Tensor, num_generations: int, max_new_tokens: int,
                temperature: float = 0.8, *, top_p: float = 1.0, top_k: int = 0, logp_temperature: float | None = None,
                prompt_keys: list[tuple[int, ...]] | None = None,
                on_progress: Callable[[], None] | None = None) -> RolloutResult:
        """Sample `num_generations` answers to each left-padded prompt; arguments as in RolloutEngine.rollout.

        per_token_logps are the server's own, at `logps_temperature(temperature)`: `must_recompute` says whether that is
        `logp_temperature`, which nothing here can change.
        Raises: ValueError for ids outside the vocabulary or prompts that fill the context, RuntimeError for servers
        that are gone or answer wrongly; the same on every rank.
        """
        attention_mask = attention_mask.bool()
        prompts = [ids[keep].tolist() for ids, keep in zip(prompt_ids.cpu(), attention_mask.cpu(), strict=True)]
        if prompt_keys is None:
            prompt_keys = [(key,) for key in torch.randint(2**62, (len(prompts),)).tolist()]
        seeds = [sampling_seed(key) for key in answer_keys(prompt_keys, num_generations)]
        sampling = Sampling(max_new_tokens, temperature, top_p, top_k, self.end_ids)
        answers = self._together(lambda ranks: self._answer_all(ranks, on_progress),
                                 RankPrompts(prompts, seeds, num_generations, sampling))
        return self._result(prompt_ids, attention_mask, num_generations, answers)

    def _answer_all(self, ranks: list[RankPrompts], on_progress: Callable[[], None] | None) -> list[list[Answer]]:
        """The answers of every rank, in its rows' order."""
        jobs = [job for rank, wanted in enumerate(ranks)
                for job in self._jobs(wanted, f" of rank {rank}" if len(ranks) > 1 else "")]

        def answer(job: tuple[SGLangServer, Job]) -> Answer:
            done = job[0].generate(job[1], self.vocab_size, self.versions.version)
            if on_progress is not None:
                on_progress()
            return done

        def attempt() -> list[Answer]:
            self._refresh()
            try:
                return self._in_parallel(answer, jobs)
            except BaseException as error:
                for server in self.servers:
                    if server is not getattr(error, "server", None):  # one that is gone has nothing to end
                        server.abort_all()
                raise

        answers = iter(self._with_recovery(attempt))
        return [[next(answers) for _ in wanted.seeds] for wanted in ranks]

    def _jobs(self, wanted: RankPrompts, suffix: str) -> list[tuple[SGLangServer, Job]]:
        """A request for each row; a prompt's answers go to one server, which then reads the prompt once.

        Raises: ValueError for an id outside the vocabulary, which would kill the server, or an empty prompt.
        """
        jobs = []
        for row, seed in enumerate(wanted.seeds):
            number, sample = divmod(row, wanted.num_generations)
            prompt, name = wanted.prompts[number], f"prompt {number}{suffix}, answer {sample}"
            wrong = [token for token in prompt if not 0 <= token < self.vocab_size]
            if wrong or not prompt:
                found = f"id {wrong[0]}" if wrong else "no token"
                raise ValueError(f"{name}: {found} in the prompt; expected one or more ids from 0 to "
                                 f"{self.vocab_size - 1}")
            jobs.append((self.servers[number % len(self.servers)], Job(name, prompt, seed, wanted.sampling)))
        return jobs

    def _result(self, prompt_ids: Tensor, attention_mask: Tensor, num_generations: int,
                answers: list[Answer]) -> RolloutResult:
        """The answers as padded tensors; what a server gives after the first end token does not count."""
        device, pad = self.device or prompt_ids.device, self.tokenizer.pad_token_id
        width = max((len(answer.ids) for answer in answers), default=0)
        ids = torch.full((len(answers), width), pad, dtype=torch.long)
        logps, given = torch.zeros(len(answers), width), torch.zeros(len(answers), width, dtype=torch.bool)
        for i, answer in enumerate(answers):
            ids[i, : len(answer.ids)] = torch.tensor(answer.ids)
            logps[i, : len(answer.ids)] = torch.tensor(answer.logps)
            given[i, : len(answer.ids)] = True
        mask = mask_until_eos(ids, given, list(self.end_ids))
        ids, logps = ids.masked_fill(~mask, pad), logps.masked_fill(~mask, 0.0)
        texts = decode_texts(self.tokenizer, ids, mask)
        ids, logps, mask = ids.to(device), logps.to(device), mask.to(device)
        prompts, prompt_mask = (tensor.to(device).repeat_interleave(num_generations, 0)
                                for tensor in (prompt_ids, attention_mask))
        return RolloutResult(
            output_ids=torch.cat([prompts, ids], dim=1),
            completion_ids=ids,
            per_token_logps=logps,
            completions=texts,
            prompt_lens=torch.full((len(answers),), prompt_ids.size(1), device=device),
            completion_mask=mask,
            attention_mask=torch.cat([prompt_mask, mask], dim=1),
            finished=has_ended(ids, mask, list(self.end_ids)),
        )


def _tokenizer_of(model_path: str | None):
    """The tokenizer in the launch folder. Raises ValueError or FileNotFoundError."""
    from trainer.loading import load_tokenizer

    if not model_path:
        raise ValueError("SGLangRolloutEngine needs a tokenizer, or the model_path of a folder that has one")
    return load_tokenizer(model_path)


def _vocabulary_of(model_path: str | None) -> int | None:
    """Rows of the embedding, from the launch folder's config where this machine sees it."""
    path = Path(model_path or "") / "config.json"
    return read_json(path).get("vocab_size") if model_path and path.is_file() else None
