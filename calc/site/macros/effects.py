"""Macros of the pages about remedies: each states the effect of a change, and fails if the sentence would be wrong."""

from __future__ import annotations

from calc.base.units import gb, gib
from calc.site.i18n import languages
from calc.site.macros.bound import Bound, PageError
from calc.site.views.jobs import claims, strategies
from calc.site.views.jobs.strategies import SHOWN, Pair

SAME_PACE = 0.02  # the share within which pages may say "as fast"


class Effects(Bound):
    """Macros that compare two jobs of the page."""

    # --- tables

    def remedy_table(self) -> str:
        """The effect of the page's remedy on each of its pairs of jobs."""
        name = self._current().meta["remedy"]["name"]
        caption = f"{name}: before and after"
        return self._place(strategies.summary(self._pairs().values(), f"{self._stem()}-summary", caption))

    def before_after(self, key: str) -> str:
        """One pair of jobs, phase by phase."""
        named = self._pairs()
        if key not in named:
            raise PageError(f"no pair {key!r} of jobs in the front matter; it has {', '.join(named)}")
        caption = f"{named[key].job}: before and after, phase by phase"
        return self._place(strategies.by_phase(named[key], f"{self._stem()}-{key}", caption))

    def remedies_overview(self) -> str:
        """Every remedy that has a page."""
        return self._place(strategies.overview(strategies.remedies(), self._root))

    def switch_on(self) -> str:
        """The settings that make the change, by framework."""
        heads = " | ".join(map(self._said, ("Framework", "Command", "Setting")))
        lines = [f"| {heads} |", "| --- | --- | --- |"]
        for row in self._current().meta["switch"]:
            framework = strategies.FRAMEWORKS[row["framework"]]
            command = f"`{row['command']}`" if "command" in row else ""
            flag = f"`{row['flag']}`" if "flag" in row else ""
            lines.append(
                f"| {framework} | {command} | {' '.join(filter(None, [flag, self._said(row.get('note', ''))]))} |"
            )
        return "\n".join(['<div class="switch" markdown>', "", *lines, "", "</div>"])

    def post(self, key: str) -> str:
        """One of the five posts by its title, linked to the case study that recomputes it."""
        title, month, page = strategies.POSTS[key]
        up = "../" * self._current().source.count("/")  # to the top of docs/
        again = f"[{self._said('computed again')}]({up}case-studies/{page}.md)"
        return self._said(f'<cite lang="zh">{title}</cite> ({month}, {again})')

    def claims_table(self, post: str) -> str:
        """Everything that a post claims, with this guide's finding and the page that treats it."""
        return self._place(claims.of_post(post, self._root))

    def claims_counted(self, finding: str = "", post: str = "") -> str:
        """The number of claims of the five posts, or of those with a finding, or of one post."""
        if not (found := claims.counted(finding, post)):
            raise PageError(f"claims_counted({finding!r}, {post!r}): there are none")
        return self._say(f"claims_counted({finding}, {post})", str(found))

    # --- claims

    def saves(self, before: str, after: str, phase: str | None = None, digits: int = 1) -> str:
        """The GPU memory that a change saves, at the peak or in a phase; an error if it saves nothing."""
        saved = self._bytes(before, phase) - self._bytes(after, phase)
        if saved < SHOWN:
            raise PageError(f"saves({before}, {after}): it does not, the difference is {gib(saved, 2)}")
        return self._say(f"saves({before}, {after}, {phase})", gib(saved, digits))

    def adds(self, before: str, after: str, phase: str | None = None, digits: int = 1) -> str:
        """The GPU memory that a change adds, at the peak or in a phase; an error if it adds nothing."""
        added = self._bytes(after, phase) - self._bytes(before, phase)
        if added < SHOWN:
            raise PageError(f"adds({before}, {after}): it does not, the difference is {gib(added, 2)}")
        return self._say(f"adds({before}, {after}, {phase})", gib(added, digits))

    def unchanged(
        self, before: str, after: str, phase: str | None = None, digits: int = 1, what: str = "device"
    ) -> str:
        """The GPU memory needed before and after a change that makes no difference; an error if it makes one.

        `what`: `device`, context and all, or `allocated`, what PyTorch's allocator counts.
        """
        held = self._bytes(before, phase, what), self._bytes(after, phase, what)
        if abs(held[0] - held[1]) >= SHOWN:
            raise PageError(f"unchanged({before}, {after}): {gib(held[0], 2)} before and {gib(held[1], 2)} after")
        return self._say(f"unchanged({before}, {after}, {phase})", gib(held[1], digits))

    def saves_host(self, before: str, after: str, digits: int = 0) -> str:
        """The host memory that a change saves on the node that needs most; an error if it saves nothing."""
        saved = strategies.host(self._ask(before)) - strategies.host(self._ask(after))
        return self._moved(f"saves_host({before}, {after})", saved, digits)

    def adds_host(self, before: str, after: str, digits: int = 0) -> str:
        """The host memory that a change adds on the node that needs most; an error if it adds nothing."""
        added = strategies.host(self._ask(after)) - strategies.host(self._ask(before))
        return self._moved(f"adds_host({before}, {after})", added, digits)

    def longer(self, before: str, after: str, digits: int = 2) -> str:
        """The factor by which a change lengthens a sequence's time; an error if it does not."""
        times = self._times(before, after)
        if times < 1 + SAME_PACE:
            raise PageError(f"longer({before}, {after}): it is not slower, {times:.3f} times as long")
        return self._say(f"longer({before}, {after})", f"{times:.{digits}f}")

    def faster(self, before: str, after: str, digits: int = 2) -> str:
        """The factor by which a change speeds up a sequence; an error if it does not."""
        times = 1 / self._times(before, after)
        if times < 1 + SAME_PACE:
            raise PageError(f"faster({before}, {after}): it is not, {times:.3f} times as fast")
        return self._say(f"faster({before}, {after})", f"{times:.{digits}f}")

    def as_fast(self, before: str, after: str) -> str:
        """The words `as long`, for a change that leaves the time of a sequence as it is; an error if it does not."""
        times = self._times(before, after)
        if abs(times - 1) > SAME_PACE:
            raise PageError(f"as_fast({before}, {after}): {times:.3f} times as long")
        return self._said("as long")

    # --- behind them

    def _moved(self, call: str, n_bytes: int, digits: int) -> str:
        shown = gb(n_bytes, digits)
        if n_bytes <= 0 or float(shown.split()[0].replace(",", "")) == 0:
            raise PageError(f"{call}: it does not, the difference is {gb(n_bytes, 2)}")
        return self._say(call, shown)

    def _bytes(self, job: str, phase: str | None, what: str = "device") -> int:
        moment = self._phase(job, phase, None).moment
        return moment.device_bytes if what == "device" else moment.allocated_bytes

    def _times(self, before: str, after: str) -> float:
        times = strategies.times(Pair("", self._ask(before), self._ask(after)))
        if times is None:
            raise PageError(f"{before}, {after}: no rate is known")
        return times

    def _pairs(self) -> dict[str, Pair]:
        try:
            return strategies.pairs(self._current().meta)
        except KeyError as missing:
            raise PageError(f"front matter, remedy: {missing} is missing") from None

    def _stem(self) -> str:
        return languages.split(self._current().source)[0].rpartition("/")[2].removesuffix(".md")
