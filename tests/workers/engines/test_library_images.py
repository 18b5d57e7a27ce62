"""Images of families beside Qwen-VL: by transformers' processors, trainer and rollout see what a plain forward sees."""

import json

import numpy
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from training import row_logprobs
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedTokenizerFast

from distflow.config.load import load
from distflow.data.batch import Batch
from planners import plan
from workers.encode import dataloader
from workers.engines.embedded import BOS, CHAT_TEMPLATE, EOS, IMAGE, PAD, build_tokenizer
from workers.engines.rounding import ROUNDING, SHARE
from workers.roles import build_roles

VOCABULARY = 320
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EYES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": 32, "patch_size": 8}
NORMAL = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SIDE = {"height": 32, "width": 32}
GRID = [[32, 32], [32, 64], [64, 32]]
MARKS = {"boi_token": IMAGE, "eoi_token": "<eoi>", "image_token": "<soft>", "start_image_token": "<img>",
         "end_image_token": "</img>", "context_image_token": IMAGE, "video_token": "<video>",
         "fake_image_token": "<fake_token_around_image>", "end_of_utterance_token": "<end_of_utterance>"}
FAMILIES = {
    "gemma3": ({"text_config": {**TEXT, "model_type": "gemma3_text", "sliding_window": 8},
                "vision_config": {**EYES, "model_type": "siglip_vision_model", "vision_use_head": False},
                "mm_tokens_per_image": 4},
               {"image_processor_type": "Gemma3ImageProcessor", "size": SIDE}, {"image_seq_length": 4}, "<soft>"),
    "llava_onevision": ({"text_config": {**TEXT, "model_type": "qwen2"}, "image_grid_pinpoints": GRID,
                         "vision_config": {**EYES, "model_type": "siglip_vision_model", "vision_use_head": False},
                         "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
                        {"image_processor_type": "LlavaOnevisionImageProcessor", "size": SIDE,
                         "image_grid_pinpoints": GRID},
                        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "image_token": IMAGE},
                        IMAGE),
    "internvl": ({"text_config": {**TEXT, "model_type": "qwen2"}, "image_seq_length": 4,
                  "vision_config": {**EYES, "model_type": "internvl_vision", "image_size": [32, 32],
                                    "patch_size": [8, 8]}},
                 {"image_processor_type": "GotOcr2ImageProcessor", "size": SIDE, "crop_to_patches": True,
                  "max_patches": 2}, {"image_seq_length": 4}, IMAGE),
    "idefics3": ({"text_config": {**TEXT, "model_type": "llama"}, "scale_factor": 2,
                  "vision_config": {**EYES, "model_type": "idefics3_vision"}},
                 {"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 64},
                  "max_image_size": {"longest_edge": 32}}, {"image_seq_len": 4}, "<image>"),
    "smolvlm": ({"text_config": {**TEXT, "model_type": "llama"}, "scale_factor": 2,
                 "vision_config": {**EYES, "model_type": "smolvlm_vision"}},
                {"image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 64},
                 "max_image_size": {"longest_edge": 32}}, {"image_seq_len": 4}, "<image>"),
}


def write(kind, folder):
    """Write a tiny model, its tokenizer and image processor, and six records, of which one has a large picture."""
    config, images, sizes, mark = FAMILIES[kind]
    shown_as = mark if mark == "<image>" else IMAGE
    marks = {**MARKS, "image_token": mark}
    small = build_tokenizer(["one two"], vocab_size=VOCABULARY - len({*marks.values()}), with_images=True)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=small.backend_tokenizer, pad_token=PAD, bos_token=BOS,
                                        eos_token=EOS, extra_special_tokens=marks,
                                        chat_template=CHAT_TEMPLATE.replace(IMAGE, shown_as))
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({**images, **NORMAL}))
    (folder / "processor_config.json").write_text(json.dumps(sizes))
    torch.manual_seed(0)
    made = CONFIG_MAPPING[kind](**config, image_token_id=tokenizer.convert_tokens_to_ids(mark))
    model = AutoModelForImageTextToText.from_config(made, attn_implementation="eager", dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    for index in range(5):
        noise = numpy.random.default_rng(index).integers(0, 256, (30, 40 + 8 * index, 3), dtype=numpy.uint8)
        Image.fromarray(noise).save(folder / f"{index}.png")
    shown = [["0.png"], ["1.png", "2.png"], [], ["3.png"], ["0.png"] * 40, ["4.png"]]
    records = [{"question": f"What is it? {index}", "answer": "12", "image": each} for index, each in enumerate(shown)]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return model


def plain(model, processor, prompt, images, response):
    """Return the log-probabilities of one row, the whole sequence in one forward."""
    seen = processor.inputs([images]) if len(images) else {}
    if "token_type_ids" in type(model).forward.__code__.co_varnames and seen:
        seen["token_type_ids"] = (torch.cat([prompt, response])[None] == model.config.image_token_id).int()
    return row_logprobs(model, prompt, response, **seen)


@pytest.mark.parametrize(("kind", "dag"), [*((kind, "grpo") for kind in FAMILIES), ("gemma3", "sft")])
def test_images_are_those_of_the_library_and_too_large_ones_are_dropped(tmp_path, kind, dag):
    if kind == "smolvlm":
        pytest.importorskip("num2words", reason="its processor asks for that")
    model = write(kind, tmp_path)
    spec = load(dag, None, [
        f"roles.actor.model={tmp_path}", f"data.train={tmp_path / 'train.jsonl'}", "data.images=image", "ranks=1",
        "data.max_prompt_tokens=220", "data.batch=8", "roles.actor.dtype=float32", "validation=null",
        "roles.actor.generation={max_new_tokens: 6, batch_rows: 4}", "roles.actor.learning_rate=1e-2"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        role = build_roles(spec, plan(spec, 1), {"actor"}, {"actor"} if dag == "grpo" else set(), "cpu")["actor"]
        batch = dataloader(spec, role, 0).next()
        prompts, images = batch["prompts"], batch["images"]
        role.image_processor.inputs([max(images.rows, key=len)])
        assert role.tokenizer.backend_tokenizer.padding is None, "a thread that encodes prompts would see it"
        assert {len(row) for row in images.rows} == {0, 1, 2}
        every = torch.arange(8).repeat_interleave(2 if dag == "grpo" else 1)
        samples = role.generate(prompts, torch.arange(16), repeats=2, images=images) if dag == "grpo" else None
        responses = samples.tokens if samples else batch["targets"]
        kept = torch.tensor([index for index, row in enumerate(responses.rows)  # else a plain forward misses an image
                             if model.config.image_token_id not in row.tolist()])
        assert len(kept) > 5
        responses, every = responses.select(kept), every[kept]
        rows = Batch(torch.arange(len(every)), {"prompts": prompts.select(every), "responses": responses,
                                                "images": images.select(every)})
        weights = torch.linspace(-1, 1, len(responses.values))
        truth = torch.cat([plain(model, role.image_processor, *row) for row in zip(
            rows["prompts"].rows, rows["images"].rows, responses.rows)])
        (truth * weights).sum().backward()
        bound = {"rtol": SHARE, "atol": ROUNDING[4].token}
        if samples:
            torch.testing.assert_close(samples.logprobs.select(kept).values, truth.detach(), **bound)
        found = role.logprobs(rows["prompts"], responses, rows["images"], 1.0)
        torch.testing.assert_close(found.values, truth.detach(), **bound)
        rows.columns["weights"] = responses.with_values(weights)
        role.engine.accumulate(rows, lambda values, _, micro: (values * micro["weights"].values).sum(), 1.0)
        own = {name: shard.grad.full_tensor() for name, shard in role.engine.shards().items() if shard.grad is not None}
        expected = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        most = max(float(each.abs().max()) for each in expected.values())
        assert any("vision" in name for name in expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(own[name], gradient, rtol=1e-3, atol=1e-4 * most, msg=name)
        role.engine.step(0)
        role.save_pretrained(tmp_path / "model")
        assert (tmp_path / "model/preprocessor_config.json").is_file()
    finally:
        dist.destroy_process_group()
