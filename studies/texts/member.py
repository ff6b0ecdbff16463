"""TextMember: one language model of a study."""

from __future__ import annotations

from lingvo_gshard.training.run import run_records
from lingvo_gshard.training.run.run_records import EvaluationRow
from studies.experts.member import SPLIT, Member


class TextMember(Member):
    """A run of a language model, which is scored by source."""

    @property
    def evaluation(self) -> EvaluationRow | None:
        """The newest scores of test; None before the run is trained and scored."""
        if not self.logdir.exists() or not self._is_trained:
            return None
        rows = run_records.read_evaluations(self.logdir)
        found = [row for row in rows if row.split == SPLIT and row.options.get("by_source")]
        return found[-1] if found else None

    def score(self) -> None:
        """Scores the texts of test, by source."""
        self._command("evaluate", f"--split={SPLIT}", "--by_source")
