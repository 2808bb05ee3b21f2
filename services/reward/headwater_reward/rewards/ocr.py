"""`ocr`: can the quoted text of the prompt be read in the image? Read with RapidOCR, whose wheel carries its models.

score = 1 when the target (the text between the first two double quotes) is contained in what was read, else
1 - min(edit distance, length) / length, both sides lower-cased and without spaces (the OCR reward of Flow-GRPO,
arXiv 2505.05470). An image in which no text is found reads as "" and scores 0: that is a measurement, not an error.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from pydantic import Field

from headwater import text_match
from headwater.errors import FailedPrecondition, HeadwaterError, InvalidArgument
from headwater_reward.registry import GoldenImage, RewardParams, Score, ScoreItem


class OcrParams(RewardParams):
    """Parameters of `ocr`."""

    text: str = Field("", pattern='^[^"]*$')  # empty: the text between the first two double quotes of the prompt
    min_confidence: float = Field(0.5, ge=0, le=1)  # lines that were read with less are ignored


class OcrReward:
    """Legibility of the quoted text."""

    name: ClassVar[str] = "ocr"
    description: ClassVar[str] = "How much of the text in double quotes can be read in the image."
    minimum: ClassVar[float | None] = 0.0
    maximum: ClassVar[float | None] = 1.0
    accepts_video: ClassVar[bool] = False
    requires: ClassVar[tuple[str, ...]] = ("rapidocr", "onnxruntime", "cv2")
    params_model: ClassVar[type[RewardParams]] = OcrParams

    def __init__(self) -> None:
        self._read: Any = None

    def load(self, threads: int) -> None:
        """Load detector, angle classifier and recogniser. Raises `FailedPrecondition` when their files are missing."""
        import rapidocr

        _check_models(Path(rapidocr.__file__).parent / "models")
        logging.getLogger("RapidOCR").setLevel(logging.ERROR)
        self._read = rapidocr.RapidOCR(
            params={
                "Global.log_level": "error",
                "EngineConfig.onnxruntime.intra_op_num_threads": threads,
                "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            }
        )
        # RapidOCR loads its models on first use; a picture with text makes it load all three.
        if "go" not in self.recognise(_draw_text("GO"), 0.0).lower():
            raise FailedPrecondition(
                "RapidOCR loaded but cannot read a plain 'GO'; reinstall rapidocr and onnxruntime", reason="OCR_BROKEN"
            )

    def score(self, batch: Sequence[ScoreItem]) -> list[Score | HeadwaterError]:
        """Scores in [0, 1], one image after the other."""
        return [self._score_one(item) for item in batch]

    def _score_one(self, item: ScoreItem) -> Score | HeadwaterError:
        params = item.params
        assert isinstance(params, OcrParams)
        prompt = f'"{params.text}"' if params.text else item.prompt
        try:
            text_match.ocr_score(prompt, "")  # a prompt without a target fails before the slow part
        except ValueError as error:
            return InvalidArgument(str(error), field="prompt", reason="PROMPT_WITHOUT_TEXT")
        read = self.recognise(item.frames_FHWC[0], params.min_confidence)
        return Score(text_match.ocr_score(prompt, read), {"characters_read": float(len(read))})

    def recognise(self, image_HWC: np.ndarray, min_confidence: float) -> str:
        """The lines read in an RGB uint8 [H, W, 3] image, top to bottom, joined without a separator."""
        result = self._read(np.ascontiguousarray(image_HWC[:, :, ::-1]), text_score=min_confidence)
        return "".join(result.txts or ())

    def golden_images(self) -> list[GoldenImage]:
        """Readable text, other text, and no text."""
        open_sign = _draw_text("OPEN 24")
        return [
            GoldenImage("OPEN 24", open_sign, 'a sign that says "open 24"', 1.0),
            GoldenImage("OPEN 24 for OPEN 365", open_sign, 'a sign that says "open 365"', 4 / 7),
            GoldenImage("no text", np.full((128, 256, 3), 255, np.uint8), 'a sign that says "HELLO"', 0.0),
        ]


def _check_models(folder: Path) -> None:
    """RapidOCR would download missing models; a reward server must not depend on a network."""
    for part in ("det", "rec", "cls"):
        if not any(folder.glob(f"*_{part}_*.onnx")):
            raise FailedPrecondition(
                f"RapidOCR's {part} model is missing from {folder}; "
                "reinstall the wheel: pip install --force-reinstall rapidocr",
                reason="OCR_MODEL_MISSING",
            )


def _draw_text(text: str) -> np.ndarray:
    """Black text on white, uint8 [128, 256, 3]."""
    image = Image.new("RGB", (256, 128), "white")
    ImageDraw.Draw(image).text((24, 36), text, fill="black", font=ImageFont.load_default(size=48))
    return np.asarray(image)
