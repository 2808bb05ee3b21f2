"""Build a tiny Stable-Diffusion-3-architecture pipeline: every part of Headwater runs on it in seconds on two cores.

    python -m headwater.diffusion.tiny_sd3 OUT

Weights are random, but chosen so that reinforcement learning has something to hold on to: the VAE is linear by
construction (latent channels are colours, see `_tiny_vae`), so that pictures of different seeds have different colours,
and the denoiser's output depends on the prompt. The folder loads in diffusers and in SGLang.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from diffusers.models.autoencoders.vae import Decoder, Encoder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, PreTrainedTokenizerFast, T5Config, T5EncoderModel
from transformers.models.clip.tokenization_clip import CLIPTokenizer

# SGLang recognises a pipeline's family by the name of its folder.
DEFAULT_NAME = "tiny-stable-diffusion-3-medium"
SIZE_PX = 64

_WIDTH = 64  # of the transformer and of T5
_LATENT_CHANNELS = 4  # red, green, blue, brightness
_VAE_CHANNELS = 8  # a positive and a negative copy of three colours and of a constant
_CONSTANT = 30.0  # of the constant channels: it dominates the norms, which makes them linear
_MEAN_GAIN = 7.0  # how much more of a picture's mean colour than of its texture the decoder shows
_COLOUR_GAIN = 0.3  # pixel value in [-1, 1] per unit of latent

PIPELINE = {
    "_class_name": "StableDiffusion3Pipeline",
    "_diffusers_version": "0.37.0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
    "text_encoder_3": ["transformers", "T5EncoderModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "tokenizer_2": ["transformers", "CLIPTokenizer"],
    "tokenizer_3": ["transformers", "T5TokenizerFast"],
    "transformer": ["diffusers", "SD3Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}


def build(out_dir: str | Path, seed: int = 0) -> Path:
    """Write the pipeline to `out_dir` (created; its files are replaced) as fp32 safetensors. Returns the folder.

    The same seed gives the same weights. The global random state is left as it was. Raises ValueError for a folder
    whose name would keep SGLang from recognising the family.
    """
    root = Path(out_dir)
    if "stable-diffusion-3-medium" not in root.name.lower():
        raise ValueError(
            f"the folder's name is {root.name!r}; it must contain 'stable-diffusion-3-medium', from which SGLang takes "
            f"the model family, e.g. {root / DEFAULT_NAME}"
        )
    root.mkdir(parents=True, exist_ok=True)
    vocabulary = _save_clip_tokenizer(root / "tokenizer")
    _save_clip_tokenizer(root / "tokenizer_2")
    piece_count = _save_t5_tokenizer(root / "tokenizer_3")
    with _seeded(seed):
        for name in ("text_encoder", "text_encoder_2"):
            _clip(vocabulary).save_pretrained(root / name)
        _t5(piece_count).save_pretrained(root / "text_encoder_3")
        _transformer().save_pretrained(root / "transformer")
        _tiny_vae().save_pretrained(root / "vae")
    FlowMatchEulerDiscreteScheduler(shift=3.0).save_pretrained(root / "scheduler")
    (root / "model_index.json").write_text(json.dumps(PIPELINE, indent=1))
    return root


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=SIZE_PX // 8,
        patch_size=2,
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=_WIDTH // 16,
        joint_attention_dim=_WIDTH,
        caption_projection_dim=_WIDTH,
        pooled_projection_dim=_WIDTH,
        pos_embed_max_size=32,
    )


def _clip(vocabulary: dict[str, int]) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=_WIDTH // 2,
        intermediate_size=_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=_WIDTH // 2,
        max_position_embeddings=77,
        hidden_act="gelu",
        bos_token_id=vocabulary["<|startoftext|>"],
        eos_token_id=vocabulary["<|endoftext|>"],
        pad_token_id=1,
        initializer_range=0.5,  # prompts must give different embeddings; the usual 0.02 makes them all alike
        initializer_factor=4.0,
    )
    return CLIPTextModelWithProjection(config)


def _t5(piece_count: int) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=piece_count,
            d_model=_WIDTH,
            d_kv=16,
            d_ff=_WIDTH,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
        )
    )


def _tiny_vae() -> AutoencoderKL:
    """An AutoencoderKL whose halves are linear maps between 8x8-pixel cells and latents.

    All residual branches are zero. The group norms see each colour beside its negative and beside a large constant, so
    they divide by a nearly constant number; SiLU of a value minus SiLU of its negative is the value. What remains is a
    1x1 map from latent to colour, an attention that adds `_MEAN_GAIN` times the mean over all positions, and
    nearest-neighbour upsampling. The encoder is the inverse on pictures made of such cells.
    """
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        sample_size=SIZE_PX,
        block_out_channels=(_VAE_CHANNELS,) * 4,
        layers_per_block=1,
        latent_channels=_LATENT_CHANNELS,
        norm_num_groups=1,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0,
        scaling_factor=1.0,
    )
    to_colour = _COLOUR_GAIN * torch.tensor([[1.0, 0, 0, 0.5], [0, 1.0, 0, 0.5], [0, 0, 1.0, 0.5]])
    _make_linear(vae.decoder, to_colour, torch.eye(3), mean_gain=_MEAN_GAIN)
    moments = torch.cat([torch.linalg.pinv(to_colour), torch.zeros(_LATENT_CHANNELS, 3)])
    _make_linear(vae.encoder, torch.eye(3), moments, mean_gain=-_MEAN_GAIN / (1 + _MEAN_GAIN))
    assert vae.encoder.conv_out.bias is not None
    with torch.no_grad():
        vae.encoder.conv_out.bias[_LATENT_CHANNELS:] = -20.0  # log-variance: the posterior is its mean
    return vae


@torch.no_grad()
def _make_linear(half: Encoder | Decoder, first: torch.Tensor, last: torch.Tensor, *, mean_gain: float) -> None:
    """Make `half` compute last @ (z + mean_gain * mean over positions of z), z = first @ input, position by position.

    `first` [3, input channels], `last` [output channels, 3].
    """
    for parameter in half.parameters():
        parameter.zero_()
    signed = torch.tensor([1.0, -1.0])
    for module in half.modules():
        if isinstance(module, nn.GroupNorm):
            module.weight.fill_(1.0)
    for sampler in _samplers(half):
        average = sampler.stride == (2, 2)
        for channel in range(_VAE_CHANNELS):
            if average:  # the padding is at the right and below: kernel positions 0 and 1 are the 2x2 cell
                sampler.weight[channel, channel, :2, :2] = 0.25
            else:
                sampler.weight[channel, channel, 1, 1] = 1.0
    # Channels: +r -r +g -g +b -b +constant -constant.
    half.conv_in.weight[:6, :, 1, 1] = torch.kron(first, signed[:, None])
    half.conv_in.bias[6:] = _CONSTANT * signed
    norm_scale = _CONSTANT * (2 / _VAE_CHANNELS) ** 0.5  # what a group norm divides by
    half.conv_out.weight[:, :6, 1, 1] = torch.kron(last, signed[None]) * norm_scale
    attention = half.mid_block.attentions[0]
    attention.to_v.weight.copy_(torch.eye(_VAE_CHANNELS))
    to_out = torch.zeros(_VAE_CHANNELS)
    to_out[:6] = mean_gain * norm_scale
    attention.to_out[0].weight.copy_(torch.diag(to_out))


def _samplers(half: Encoder | Decoder) -> Iterator[nn.Conv2d]:
    blocks: Any = half.down_blocks if isinstance(half, Encoder) else half.up_blocks
    for block in blocks:
        for sampler in (block.downsamplers if isinstance(half, Encoder) else block.upsamplers) or ():
            yield sampler.conv


def _save_clip_tokenizer(folder: Path) -> dict[str, int]:
    """A byte-level CLIP tokenizer without merges: one token a byte. Returns the vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": 77,
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    CLIPTokenizer.from_pretrained(folder).save_pretrained(folder)
    return vocabulary


def _save_t5_tokenizer(folder: Path) -> int:
    """A unigram tokenizer of single ASCII characters. Returns the number of pieces."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(chr(code), -3.0) for code in range(33, 127)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=512,
    ).save_pretrained(folder)
    return len(pieces)


def main() -> None:
    """Entry point of `python -m headwater.diffusion.tiny_sd3`."""
    parser = argparse.ArgumentParser(description="Build a tiny random Stable-Diffusion-3 pipeline.")
    parser.add_argument("out", type=Path, help=f"folder to write, e.g. models/{DEFAULT_NAME}")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default 0)")
    arguments = parser.parse_args()
    print(build(arguments.out, arguments.seed))


if __name__ == "__main__":
    main()
