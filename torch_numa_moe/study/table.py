"""The study's outcome as Markdown, to be pasted into an issue."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch_numa_moe.placement import LOWEST_LOCAL_SHARE
from torch_numa_moe.study.arms import DEFAULT_ARM, ArmSetting
from torch_numa_moe.study.start import StartResult

__all__ = ["ArmSummary", "Start", "markdown", "summarize"]


@dataclass(frozen=True)
class Start:
    """A start that was made.

    Attributes:
        number: from 1, in the order in which they were made.
        arm: its letter.
        result: what came of it, None if it failed.
        dropped: why it doesn't count although it ran, or "".
        error: why it failed, or "".
    """

    number: int
    arm: str
    result: StartResult | None = None
    dropped: str = ""
    error: str = ""

    @property
    def kept(self) -> bool:
        """Whether it counts."""
        return self.result is not None and not self.dropped


def why_dropped(setting: ArmSetting, result: StartResult) -> str:
    """Why a start doesn't count, or "".

    An arm that is to have its weights on their nodes measures something else when they aren't there.
    """
    share = result.lowest_local_share
    if not setting.placed or share is None or share >= LOWEST_LOCAL_SHARE:
        return ""
    return f"only {share:.1%} of a slice on its node, less than {LOWEST_LOCAL_SHARE:.0%}"


@dataclass(frozen=True)
class ArmSummary:
    """What an arm's starts that count come to.

    Attributes:
        arm: its letter.
        starts: how many count.
        made: how many were made.
        token_ms, lowest_ms, highest_ms: median and range of all samples.
        ratio: median of the default's over this one's; None without a default.
    """

    arm: str
    starts: int
    made: int
    token_ms: float
    lowest_ms: float
    highest_ms: float
    ratio: float | None


def summarize(starts: Sequence[Start]) -> dict[str, ArmSummary]:
    """By the arm's letter; arms without a start that counts are left out."""
    samples: dict[str, list[float]] = {}
    for start in starts:
        if start.kept and start.result is not None:
            samples.setdefault(start.arm, []).extend(start.result.token_ms)
    medians = {arm: statistics.median(values) for arm, values in samples.items()}
    default = medians.get(DEFAULT_ARM)
    return {
        arm: ArmSummary(
            arm=arm,
            starts=sum(start.arm == arm and start.kept for start in starts),
            made=sum(start.arm == arm for start in starts),
            token_ms=medians[arm],
            lowest_ms=min(values),
            highest_ms=max(values),
            ratio=None if default is None else default / medians[arm],
        )
        for arm, values in samples.items()
    }


def markdown(
    machine: Mapping[str, str],
    load: str,
    token_bytes: float,
    settings: Mapping[str, ArmSetting],
    chosen: Sequence[str],
    starts: Sequence[Start],
) -> str:
    """The whole outcome.

    Args:
        machine: facts by name.
        load: what was decoded, in words.
        token_bytes: weights that a token reads, all layers.
        settings: of every arm, by its letter.
        chosen: letters of the arms that were asked for.
        starts: all that were made.
    """
    lines = ["### NUMA study", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += [f"- load: {load}", ""]
    lines += _arm_table(token_bytes, settings, chosen, starts)
    reasons: dict[str, list[str]] = {}
    for letter in chosen:
        if settings[letter].refusal:
            reasons.setdefault(settings[letter].refusal, []).append(letter)
    if reasons:
        lines.append("")
    lines += [f"Not run here: {', '.join(letters)} ({reason})." for reason, letters in reasons.items()]
    if any(settings[letter].split.startswith("test") for letter in chosen):
        lines += ["", "With NUMA_MOE_SPLIT=test slices lie anywhere: this tries out the protocol, no more."]
    lines += ["", "Starts, in order:", "", *_start_table(starts)]
    plans = {start.arm: start.result.plan for start in starts if start.result is not None}
    for letter, plan in plans.items():
        lines += [
            "",
            f"<details><summary>plan of {letter}</summary>",
            "",
            "```",
            plan,
            "```",
            "",
            "</details>",
        ]
    return "\n".join(lines)


def _arm_table(
    token_bytes: float, settings: Mapping[str, ArmSetting], chosen: Sequence[str], starts: Sequence[Start]
) -> Iterator[str]:
    yield "| arm | workers | starts | ms a token, median (range) | GB/s | pages | times the default's speed |"
    yield "|---|---|---|---|---|---|---|"
    summaries = summarize(starts)
    for letter in chosen:
        title = f"{letter}: {settings[letter].arm.title}"
        summary = summaries.get(letter)
        if summary is None:
            made = sum(start.arm == letter for start in starts)
            why = "not run" if settings[letter].refusal else f"0 of {made}"
            yield f"| {title} | - | {why} | - | - | - | - |"
            continue
        kept = [start.result for start in starts if start.arm == letter and start.kept and start.result]
        ratio = "-" if summary.ratio is None else f"{summary.ratio:.2f}"
        yield (
            f"| {title} | {_workers(kept[0])} | {summary.starts} of {summary.made} "
            f"| {summary.token_ms:.3g} ({summary.lowest_ms:.3g}-{summary.highest_ms:.3g}) "
            f"| {token_bytes / summary.token_ms / 1e6:.1f} | {_pages(settings[letter], kept)} | {ratio} |"
        )


def _workers(result: StartResult) -> str:
    return " + ".join(map(str, result.workers)) + (" + caller" if result.caller_helps else "")


def _pages(setting: ArmSetting, results: Sequence[StartResult]) -> str:
    """Of placed slices the lowest share on their node, of others where pages are."""
    unverified = next((result.unverified for result in results if result.unverified), "")
    if unverified:
        return f"unverified ({unverified})"
    shares = [share for result in results if (share := result.lowest_local_share) is not None]
    if setting.placed and shares:
        return f"at least {min(shares):.1%} on their node"
    totals: dict[str, int] = {}
    for result in results:
        for counts in result.pages_on_node:
            for node, pages in counts.items():
                totals[node] = totals.get(node, 0) + pages
    whole = sum(totals.values())
    if not whole:
        return "unknown"
    return ", ".join(f"node {node} {totals[node] / whole:.0%}" for node in sorted(totals, key=int))


def _start_table(starts: Sequence[Start]) -> Iterator[str]:
    yield "| # | arm | ms a token | slices on their node | |"
    yield "|---|---|---|---|---|"
    for start in starts:
        if start.result is None:
            error = start.error.replace("|", "\\|")
            yield f"| {start.number} | {start.arm} | - | - | FAILED: {error} |"
            continue
        samples = ", ".join(f"{milliseconds:.3g}" for milliseconds in start.result.token_ms)
        shares = ["-" if share is None else f"{share:.1%}" for share in start.result.local_shares]
        remark = f"DROPPED: {start.dropped}" if start.dropped else "kept"
        yield f"| {start.number} | {start.arm} | {samples} | {', '.join(shares)} | {remark} |"
