"""Images: their patches and positions are the library's, and trainer and rollout see what a plain forward sees."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from training import row_logprobs
from transformers import AutoImageProcessor, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from distflow.config.run import Generation
from distflow.data.batch import Ragged
from workers.encode import NO_IMAGE
from workers.engines.embedded import EMBEDDED_IMAGE_PROCESSOR, IMAGE_ID, build_model
from workers.engines.hf import HFRollout
from workers.engines.policy import Policy, inputs_of
from workers.engines.vision import ImageProcessor, attach_images, image_inputs, same_as_previous

SIZES = ((32, 32), (16, 48), (32, 32), (48, 16), (17, 30))


def picture(height: int, width: int, seed: int) -> Image.Image:
    noise = numpy.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(noise)


@pytest.fixture(params=["qwen3_vl", "qwen2_5_vl"])
def model(request):
    """The embedded model, and one of the generation before it, whose eyes work in windows."""
    if request.param == "qwen3_vl":
        return build_model(270, 0, architecture="qwen3_vl", layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32)
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "patch_size": 8,
              "out_hidden_size": 64, "window_size": 32, "fullatt_block_indexes": [1], "initializer_range": 0.06}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    text = {"vocab_size": 270, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "eos_token_id": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope, "initializer_range": 0.06}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision,
                                                                   image_token_id=IMAGE_ID, tie_word_embeddings=True))
    return attach_images(made.float(), EMBEDDED_IMAGE_PROCESSOR)


def examples() -> tuple[Ragged, Ragged]:
    """Prompts with one image, two images, one and none; the first and third have the same tokens."""
    images = [EMBEDDED_IMAGE_PROCESSOR.pixels(picture(*size, seed)) for seed, size in enumerate(SIZES)]
    rows = [images[:1], images[1:2] + images[3:4], images[2:3], []]
    texts = [torch.tensor([7, 8]), torch.tensor([9, 10, 11]), torch.tensor([7, 8]), torch.tensor([12, 13, 14, 15])]
    shown = [[picture(*SIZES[index], 0) for index in row] for row in ((0,), (1, 3), (2,), ())]
    spans = [[[6, *span] for span in EMBEDDED_IMAGE_PROCESSOR.spans(row, IMAGE_ID)] for row in shown]
    prompts = [torch.cat([*map(torch.tensor, row), text])
               for row, text in zip(spans, texts)]
    return Ragged.from_rows(prompts), Ragged.from_rows([Ragged.from_rows(row) if row else NO_IMAGE for row in rows])


def plain(model, prompt: torch.Tensor, images: Ragged, response: torch.Tensor) -> torch.Tensor:
    """One row, the whole sequence in one forward, positions by the library."""
    seen = image_inputs(model, Ragged.from_rows([images]))
    kinds = {"mm_token_type_ids": (torch.cat([prompt, response])[None] == IMAGE_ID).int()} if seen else {}
    return row_logprobs(model, prompt, response, **seen, **kinds)


@pytest.mark.parametrize("image_processor", [EMBEDDED_IMAGE_PROCESSOR, ImageProcessor(patch=14, merge=2),
                                             ImageProcessor(patch=16, merge=2, max_pixels=9000)])
@pytest.mark.parametrize("size", [(32, 32), (200, 61), (97, 300)])
def test_patches_are_those_of_the_library(tmp_path, image_processor, size):
    image_processor.save(tmp_path)
    assert ImageProcessor.read(tmp_path) == image_processor
    try:
        library = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    except ImportError as error:  # transformers 5.17 asks for torchvision even so
        pytest.skip(str(error))
    theirs = library(picture(*size, 0), return_tensors="pt")
    ours = image_processor.pixels(picture(*size, 0))
    patches, grid = image_processor.patches(ours)
    assert grid == tuple(theirs["image_grid_thw"][0].tolist())
    assert len(image_processor.spans([picture(*size, 0)], 7)[0]) == grid[1] * grid[2] // image_processor.merge**2
    assert torch.allclose(patches, theirs["pixel_values"], atol=1e-5)


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_sizes_are_those_of_the_library(height, width):
    image_processor = ImageProcessor(patch=14, merge=2)
    if max(height, width) / min(height, width) <= 200:
        assert image_processor.size(height, width) == smart_resize(height, width, 28, image_processor.min_pixels,
                                                                   image_processor.max_pixels)


def test_log_probabilities_and_gradients_equal_plain_forwards(model):
    prompts, images = (column.select(torch.tensor([0, 0, 1, 2, 2, 3])) for column in examples())
    assert same_as_previous(images).tolist() == [True, False, False, True, False]
    generator = torch.Generator().manual_seed(1)
    responses = Ragged.from_rows([torch.randint(6, 260, (length,), generator=generator)
                                  for length in (4, 2, 7, 3, 5, 6)])
    weights = torch.linspace(-1, 1, len(responses.values))
    inputs = inputs_of(prompts, responses, 0, torch.device("cpu"), same_as_previous(images))
    assert inputs[2].tolist() == [0, 0, 1, 2, 2, 3]
    seen = image_inputs(model, images.select(torch.tensor([0, 2, 3, 5])))
    logprobs, _ = Policy(model)(*inputs, images=seen)
    (logprobs * weights).sum().backward()
    shared = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    expected = torch.cat([plain(model, *row) for row in zip(prompts.rows, images.rows, responses.rows)])
    (expected * weights).sum().backward()
    assert torch.allclose(logprobs, expected, atol=1e-5)
    assert any("visual" in name for name in shared)
    for name, parameter in model.named_parameters():
        assert torch.allclose(shared[name], parameter.grad, atol=2e-5), name


def test_the_rollout_agrees_with_plain_forwards_and_generate(model):
    prompts, images = examples()
    rollout = HFRollout(copy.deepcopy(model), Generation(max_new_tokens=9, batch_rows=5), pad_token=0, end_tokens=[2])
    samples = rollout.generate(prompts, 3, torch.arange(12), key=1, images=images)
    index = torch.arange(4).repeat_interleave(3)
    rows = zip(prompts.select(index).rows, images.select(index).rows, samples.tokens.rows)
    with torch.no_grad():
        assert torch.allclose(torch.cat([plain(model, *row) for row in rows]), samples.logprobs.values, atol=1e-5)
    greedy = rollout.generate(prompts, 1, torch.arange(4), key=1, temperature=0.0, images=images).tokens.rows
    for prompt, shows, ours in zip(prompts.rows, images.rows, greedy):
        seen = image_inputs(model, Ragged.from_rows([shows]))
        kinds = {"mm_token_type_ids": (prompt == IMAGE_ID).int()[None]} if seen else {}
        theirs = model.generate(prompt[None], max_new_tokens=9, do_sample=False, eos_token_id=2, pad_token_id=0, **seen,
                                **kinds)[0]
        assert ours.tolist() == theirs[len(prompt) :].tolist()
