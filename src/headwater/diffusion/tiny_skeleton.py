"""The model in the box before training: a small SD3 pipeline for 64x64 pixels around a trained VAE.

    python -m headwater.diffusion.tiny_skeleton OUT --vae DIR

Text is cheap: prompts are at most `CLIP_TOKENS` words, and words in capitals and digits are spelled letter by letter,
so that a model can learn to write them. Both CLIP encoders are frozen and random with one layer: what SD3 takes from
them, the state before the last layer, is a random vector per word plus one per place. T5 gives one constant token.
"""

import argparse
import json
import shutil
import string
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from headwater.diffusion.families.config import read_config
from headwater.diffusion.tiny_sd3 import PIPELINE

SIZE_PX = 64
CLIP_TOKENS, T5_TOKENS = 24, 1
STOCK_CLIP_TOKENS = 77  # positions that SGLang's and diffusers' own pipelines may ask for
CLIP_WIDTH, T5_WIDTH = 64, 128
LAYERS, HEADS, HEAD_DIM = 6, 5, 32
SHIFT = 2.0  # of the sigma grid

_WORDS = (
    "a an the one two three four single picture drawing image photo of on in with and to is left right above "
    "below over under beneath next beside side between background word words text number numbers digits sign that "
    "says letter letters circle circles disc disk square squares triangle triangles star stars shape shapes "
    "object objects red orange yellow green cyan turquoise blue purple violet pink white light dark gray grey "
    "black cream navy gradient plain small large big"
)
_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")

_TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")
_PIPELINE = PIPELINE | {name: ["transformers", "PreTrainedTokenizerFast"] for name in _TOKENIZERS}


def build(out_dir: str | Path, vae_dir: str | Path, seed: int = 0) -> Path:
    """Write the pipeline to `out_dir` (created; its files are replaced), with a copy of the VAE in `vae_dir`.

    The text encoders are stored in fp16, the denoiser in fp32: it is trained next.

    The same seed gives the same weights. The global random state is left as it was. Raises ValueError when `vae_dir`
    holds no VAE.
    """
    root, vae_dir = Path(out_dir), Path(vae_dir)
    channels = int(read_config(vae_dir, "config.json")["latent_channels"])
    root.mkdir(parents=True, exist_ok=True)
    for name, length in (("tokenizer", CLIP_TOKENS), ("tokenizer_2", CLIP_TOKENS), ("tokenizer_3", T5_TOKENS)):
        vocabulary = _save_tokenizer(root / name, length)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in ("text_encoder", "text_encoder_2"):
            _clip(vocabulary).half().save_pretrained(root / name)
        _t5(len(vocabulary)).half().save_pretrained(root / "text_encoder_3")
        _transformer(channels).save_pretrained(root / "transformer")
    shutil.copytree(vae_dir, root / "vae", dirs_exist_ok=True)
    FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(root / "scheduler")
    (root / "model_index.json").write_text(json.dumps(_PIPELINE, indent=1))
    return root


def _transformer(latent_channels: int) -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=SIZE_PX // 8,
        patch_size=1,
        in_channels=latent_channels,
        out_channels=latent_channels,
        num_layers=LAYERS,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=T5_WIDTH,
        caption_projection_dim=HEADS * HEAD_DIM,
        pooled_projection_dim=2 * CLIP_WIDTH,
        pos_embed_max_size=SIZE_PX // 8,
        qk_norm="rms_norm",
    )


def _clip(vocabulary: dict[str, int]) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=CLIP_WIDTH,
        intermediate_size=CLIP_WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        projection_dim=CLIP_WIDTH,
        max_position_embeddings=STOCK_CLIP_TOKENS,
        hidden_act="gelu",
        bos_token_id=vocabulary["<bos>"],
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<pad>"],
    )
    model = CLIPTextModelWithProjection(config)
    embeddings = model.text_model.embeddings
    with torch.no_grad():
        embeddings.token_embedding.weight.normal_(std=1.0)
        embeddings.position_embedding.weight.normal_(std=0.7)
        model.text_projection.weight.normal_(std=CLIP_WIDTH**-0.5)
    return model


def _t5(vocabulary_size: int) -> T5EncoderModel:
    config = T5Config(
        vocab_size=vocabulary_size,
        d_model=T5_WIDTH,
        d_kv=8,
        d_ff=8,
        num_layers=1,
        num_heads=1,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    return T5EncoderModel(config)


def _save_tokenizer(folder: Path, max_length: int) -> dict[str, int]:
    """One token a word in small letters, one a capital letter, digit or mark. Returns the vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    known = [*_SPECIAL, *_WORDS.split(), *string.ascii_uppercase, *string.digits, '"', "'", ".", ",", "!", "?", "-"]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(known))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("[a-z]+|[^a-z]"), "isolated")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>" if max_length > 1 else "<eos>",
        special_tokens=[(token, vocabulary[token]) for token in ("<bos>", "<eos>")],
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=max_length,
    ).save_pretrained(folder)
    return vocabulary


def main() -> None:
    """Entry point of `python -m headwater.diffusion.tiny_skeleton`."""
    parser = argparse.ArgumentParser(description="Build the pipeline of the model in the box, before its training.")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--vae", type=Path, required=True, help="folder of a trained VAE (scripts/train_tiny_vae.py)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    arguments = parser.parse_args()
    print(build(arguments.out, arguments.vae, arguments.seed))


if __name__ == "__main__":
    main()
