"""The files of a profile, in the folders where XProf and TensorBoard look for them.

For the steps 20:23, the files are in LOGDIR/profile/plugins/profile/steps_20-23/:

    HOST.xplane.pb      the trace, for XProf
    HOST.trace.json.gz  the trace, for Perfetto
    profile.json        the summary
    comparison.json     predicted and measured time, if there was a plan
    calibration.json    ratios of measured to predicted time, for gshard-plan --calibration
"""

from __future__ import annotations

import pathlib
import socket

from lingvo_gshard.planning.calibration import Calibration
from lingvo_gshard.profiling import perfetto
from lingvo_gshard.profiling.comparison import Comparison
from lingvo_gshard.profiling.profile import Profile
from lingvo_gshard.profiling.timeline import StepProgram, StepRange
from lingvo_gshard.profiling.trace import Trace
from lingvo_gshard.training.run import processes

FOLDER = "profile"
SUMMARY, COMPARISON, CALIBRATION = "profile.json", "comparison.json", "calibration.json"


class ProfileFiles:
    """The folder of one profile.

    Attributes:
      root: the directory to open in XProf or TensorBoard.
      path: the folder of this profile.
    """

    def __init__(self, directory: pathlib.Path, steps: StepRange):
        """Names the folder; nothing is written.

        Args:
          directory: the run's directory.
          steps: the profiled steps.
        """
        self.root = directory / FOLDER
        self.path = self.root / "plugins" / "profile" / f"steps_{steps.first}-{steps.last}"

    @property
    def _host(self) -> str:
        """The host's name, and the process's number if there are several."""
        name = socket.gethostname()
        return name if processes.count() == 1 else f"{name}_{processes.index()}"

    @property
    def xspace(self) -> pathlib.Path:
        """The trace of this process for XProf."""
        return self.path / f"{self._host}.xplane.pb"

    @property
    def perfetto(self) -> pathlib.Path:
        """The trace of this process for Perfetto."""
        return self.path / f"{self._host}.trace.json.gz"

    def write_trace(self, serialized: bytes) -> None:
        """Writes the trace as recorded."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.xspace.write_bytes(serialized)

    def write_perfetto(self, trace: Trace, program: StepProgram) -> None:
        """Writes the trace with the layer of each operation."""
        self.perfetto.write_bytes(perfetto.encode(trace, program))

    def write_summary(self, profile: Profile) -> None:
        """Writes the summary."""
        (self.path / SUMMARY).write_text(profile.to_json(), encoding="utf-8")

    def write_comparison(self, comparison: Comparison, calibration: Calibration | None) -> None:
        """Writes the comparison with a plan, and the calibration if there is one."""
        (self.path / COMPARISON).write_text(comparison.to_json(), encoding="utf-8")
        if calibration is not None:
            (self.path / CALIBRATION).write_text(calibration.to_json(), encoding="utf-8")
