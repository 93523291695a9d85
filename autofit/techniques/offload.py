"""Where optimizer states and parameters live."""

from __future__ import annotations

from autofit.lattice import Axis, Config, chain
from autofit.techniques.job import Job
from autofit.techniques.technique import Technique


class Offload(Technique):
    """`none` keeps everything on the device. The others need DeepSpeed and come with a later release."""

    axis = Axis(
        name="offload",
        values=("nvme", "params", "optimizer", "none"),
        recipe="none",
        lighter=chain("nvme", "params", "optimizer", "none"),
    )

    later = frozenset({"nvme", "params", "optimizer"})

    def unsupported(self, config: Config, job: Job) -> str | None:
        if config["offload"] in self.later:
            return f"offload={config['offload']} is not built yet: it comes with a later release; use offload=none"
        return None
