"""Join the JSON files of one tools/gpu_check.sh run into one report: tools/gpu_report.py DIR OUT [COMMIT]."""

import json
import subprocess
import sys
from pathlib import Path


def git(*arguments: str) -> str:
    result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    # `git describe --always --dirty --abbrev=40`, run where the history is: the GPU machine may have none
    described = (sys.argv[3] if len(sys.argv) > 3 else "") or git("describe", "--always", "--dirty", "--abbrev=40")
    report: dict = {"commit": described.removesuffix("-dirty"), "clean_tree": not described.endswith("-dirty")}
    for name in ("model", "engine", "stress", "prewarm_cold", "prewarm_warm"):
        path = folder / f"{name}.json"
        report[name] = json.loads(path.read_text()) if path.is_file() and path.stat().st_size else None
    report["ops"] = {}
    for path in sorted((folder / "ops").glob("*.json")):
        report["ops"].update(json.loads(path.read_text()).get("ops", {}))
    report["gpu"], report["torch"] = report["model"]["gpu"], report["model"]["torch"]
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
