"""Take the pictures of TensorBoard in docs/tensorboard.md, on light and on dark.

    cd examples/tutorials && python controller.py && tensorboard --logdir runs --port 6006
    python benchmarks/tensorboard_pictures.py

Needs playwright (the extra ``browser``) and a chromium that the machine has.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import FloatRect, sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SHOTS: dict[str, tuple[str, int, FloatRect]] = {
    "scalars": ("custom_scalars", 1100, {"x": 286, "y": 72, "width": 716, "height": 1582}),
    "scalars_narrow": ("custom_scalars", 700, {"x": 281, "y": 72, "width": 370, "height": 2802}),
    "text": ("text", 1000, {"x": 281, "y": 72, "width": 716, "height": 1240}),
    "text_narrow": ("text", 780, {"x": 281, "y": 72, "width": 496, "height": 1240}),
}
"""Name -> TensorBoard's page, width of the window, and what is kept of it."""


def main() -> None:
    """Write the pictures for each colour scheme."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--address", default="http://127.0.0.1:6006", help="of TensorBoard")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder (default: docs/images)")
    options = parser.parse_args()
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    with sync_playwright() as tool:
        started = tool.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for name, (page, width, clip) in SHOTS.items():
            for scheme in ("light", "dark"):
                tab = started.new_page(
                    viewport={"width": width, "height": 3000},
                    color_scheme=scheme,
                    device_scale_factor=1.5,
                )
                tab.goto(f"{options.address}/#{page}")
                tab.wait_for_timeout(6000)  # charts are drawn with an animation
                path = options.out / f"tensorboard_{name}_{scheme}.png"
                taken = Image.open(io.BytesIO(tab.screenshot(clip=clip))).convert("RGB")
                taken.quantize(32, dither=Image.Dither.NONE).save(path, optimize=True)
                tab.close()


if __name__ == "__main__":
    main()
