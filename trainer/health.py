"""The classic ways in which RLHF goes wrong, watched while a run trains: what was seen, where, and what to try.

`HealthMonitor.observe` is given the numbers of every logged step and gives the alarms that they raise. It is a function
of the numbers alone, so a resumed run, which reads them back from metrics.jsonl, alarms as the run it goes on with.
The checks themselves are in trainer/health_checks.py. Imports neither torch nor numpy.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from trainer.health_checks import CHECKS, Finding, Past, Settings

REPEAT = 50  # rollout steps before an alarm that did not get worse is said again


@dataclass(frozen=True)
class Alarm:
    """One thing that looks wrong. severity: "warning", or "severe" where going on is most likely a waste."""

    name: str
    severity: str
    step: int
    message: str

    def line(self) -> str:
        return f"[health] step {self.step}, {self.severity}, {self.name}: {self.message}"


def alarm_entries(alarms: list[Alarm]) -> dict:
    """What a step's line in metrics.jsonl says about its alarms: health/{name} 1 or 2 (severe), and their texts."""
    if not alarms:
        return {}
    entries = {f"health/{alarm.name}": 2.0 if alarm.severity == "severe" else 1.0 for alarm in alarms}
    return {**entries, "health/messages": [alarm.message for alarm in alarms]}


class HealthMonitor:
    """Looks at every logged step; an alarm is said again only after REPEAT steps, or if it got worse.

    Worse: it became severe, or its number doubled.
    """

    def __init__(self, settings: Settings | None = None):
        self.settings, self.past = settings or Settings(), Past()
        self.said: dict[str, tuple[int, Finding]] = {}  # by name: when, and what

    @classmethod
    def for_run(cls, args) -> "HealthMonitor":
        """The monitor for the flags of either script."""
        flag = "beta" if hasattr(args, "beta") else "kl_coef"
        dtype = getattr(args, "dtype", "float32")
        exact = dtype == "float32" and getattr(args, "rollout_engine", "torch") == "torch"
        return cls(Settings(kl_weight=getattr(args, flag, 0.0), kl_flag=f"--{flag}", exact=exact,
                            scaled=dtype == "float16"))  # fmt: skip

    def observe(self, metrics: dict) -> list[Alarm]:
        """The alarms that one logged step raises; none for a line without a reward, as an evaluation's is."""
        if "reward" not in metrics:
            return []
        self.past.add(metrics)
        alarms = []
        for check in CHECKS:
            finding = check(self.past, self.settings)
            if finding is not None and self._is_news(check.__name__, finding):
                self.said[check.__name__] = (metrics["step"], finding)
                severity = "severe" if finding.severe else "warning"
                alarms.append(Alarm(check.__name__, severity, metrics["step"], finding.message))
        return alarms

    def restore(self, rows: Iterable[dict]) -> None:
        """Take in the lines of a run that is being resumed, without saying anything."""
        for row in rows:
            self.observe(row)

    def _is_news(self, name: str, finding: Finding) -> bool:
        if name not in self.said:
            return True
        step, before = self.said[name]
        worse = finding.severe > before.severe or finding.badness >= 2 * before.badness
        return worse or self.past.now["step"] - step >= REPEAT
