"""Public training logs, and what their sources or collectors say of them.

The logs themselves are no part of the repository; each is named with the repository and file that
it is an excerpt of, so that it can be had again. Steps are spelled as our readers count them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CASES", "Case"]

Verdict = Literal["healthy", "faulty", "either"]


@dataclass(frozen=True)
class Case:
    """One log and its known story."""

    verdict: Verdict
    """either: both can be argued."""
    fault: tuple[int, int] | None
    """First and last step at which the fault ought to be seen first; None: there is none."""
    story: str
    """What happened, in a few words."""
    source: str
    """Repository and file, or issue."""
    fault_run: int = 0
    """Segment of the log in which it is."""


_DS_CHAT = "deepspeedai/DeepSpeedExamples: applications/DeepSpeed-Chat/training"
_TUTORIALS = "hwang2006/large-scale-lm-tutorials"
_BIGSCIENCE = "bigscience-workshop/bigscience"
_MODDED = "KellerJordan/modded-nanogpt: records/track_1_short"
_MS_COURSES = "mindspore-courses/applications"
_MS_MODELS = "mindspore-ai/models: research/cv"

CASES: dict[str, Case] = {
    "ds_chat_reward_rank_duplicates.log": Case(
        "healthy", None, "16 ranks print each of 10 start-up overflows", f"{_DS_CHAT}/step2"),
    "ds_chat_rlhf_two_engines.log": Case(
        "healthy", None, "two scalers print alike; losses around 0", f"{_DS_CHAT}/step3"),
    "ds_chat_sft_dynamic_scale.log": Case(
        "healthy", None, "113 of 6050 steps skipped by a probing scaler", f"{_DS_CHAT}/step1"),
    "ds_zero_init_scale_too_high.log": Case(
        "healthy", None, "8 runs; scale searched down from 2^32",
        f"{_TUTORIALS}: docs/07_zero_redundancy_optimization.md"),
    "fairseq_fsdp_13b_two_runs.log": Case(
        "either", (3, 3), "10-step runs with a steep warm-up: loss 16 to 25",
        "facebookresearch/fairseq: examples/fully_sharded_data_parallel/README.md"),
    "hf_grpo_zero_loss.trainer_state.json": Case(
        "healthy", None, "79 % of the losses are 0",
        "ijinyu1113/Learned-Remasking-Policy-for-dLLM"),
    "hf_lora_every_step_healthy.trainer_state.json": Case(
        "healthy", None, "smooth", "TheUn4given123jkbkjs/Viettel_Race_2026"),
    "hf_mistral_translator_one_spike.trainer_state.json": Case(
        "healthy", None, "loss steps down at epoch ends; one norm 4.6x",
        "syGOAT/Mistral-v0.2-Translator-bf16"),
    "hf_qlora_lr5_diverged.trainer_state.json": Case(
        "faulty", (2, 3), "learning rate 5: loss 1.6 to 11.8, then constant",
        "poludmik/qlora-fine-tune"),
    "hf_sft_early_gn_spike.trainer_state.json": Case(
        "healthy", None, "norm 57 in the first record", "XXX616519/CogniDet_Repository"),
    "hf_speculator_isolated_gn_spikes.trainer_state.json": Case(
        "healthy", None, "14 single norm spikes, loss unmoved", "HangerYang/Star"),
    "hf_trocr_gradnorm_not_unscaled.trainer_state.json": Case(
        "healthy", None, "norms of 1e5 - 4e6 throughout",
        "armenkarakashian/TrOcr-Number-Line-Fraction-Recognition"),
    "hf_whisper_bashkir_fp16.trainer_state.json": Case(
        "healthy", None, "norm falls 15x in the warm-up",
        "akhmetvaleev-ruslan/bashkir-language-audio2text"),
    "hf_whisper_braj_lr_too_high.trainer_state.json": Case(
        "faulty", (1000, 1500), "learning rate up to 3e-3: loss 1.2 to 2.2",
        "Tanisha-anshu/OpenAi-Whisper-small-Braj"),
    "llamafactory_resumed_duplicates.jsonl": Case(
        "healthy", None, "two writers, and a resume 240 steps back",
        "rameyjm7/SFT-Training-LLM"),
    "llmc_main_norm_lr.log": Case(
        "healthy", None, "norm 15 to 0.3", f"{_MODDED}/2024-10-13_llmc"),
    "meg_104b_tr8_spikes_diverged.log": Case(
        "faulty", (7010, 7010), "loss 6.4 to 11.4, later NaN; two more attempts",
        f"{_BIGSCIENCE}: train/tr8-104B-wide/chronicles.md"),
    "meg_104b_tr8b_scale_collapse.log": Case(
        "faulty", (17062, 17065), "loss 2.7 to 4.4, overflow in nearly every step",
        f"{_BIGSCIENCE}: train/tr8b-104B/chronicles.md"),
    "meg_13b_tr1_spike_gn_zero.log": Case(
        "faulty", (29050, 29060), "loss 2.8 to 8.7, 500 steps to recover",
        f"{_BIGSCIENCE}: train/tr1-13B-base/chronicles.md"),
    "meg_176b_tr11_spike_recovered.log": Case(
        "either", (31216, 31219), "norm 0.24 to 960, loss 2.2 to 5.1, recovers by itself",
        f"{_BIGSCIENCE}: train/tr11-176B-ml/chronicles.md"),
    "meg_gpt2_16node_diverge_warmup.log": Case(
        "faulty", (3, 5), "loss 12 to 48 in the warm-up",
        f"{_BIGSCIENCE}: experiments/gpt2-meg-ds-3d"),
    "meg_gpt2_16node_ds_on_gn_zero.log": Case(
        "either", (3, 5), "loss 12 to 43 in the warm-up, then down to 7.7",
        f"{_BIGSCIENCE}: experiments/gpt2-meg-ds-3d"),
    "meg_gpt2_345m_healthy.log": Case(
        "healthy", None, "17 skips at the start, one norm 22.9",
        f"{_TUTORIALS}: notebooks/06_tensor_parallelism.ipynb"),
    "mf_llama2_13b_first_steps.log": Case(
        "healthy", None, "five steps; damaged norms", "mindspore-ai/docs: high_availability.md"),
    "mf_skip_by_global_norm_abort.log": Case(
        "either", None, "norm 44 in step 1 against a threshold of 3",
        "mindspore-ai/docs: skip_data_and_ckpt_health_monitor.md"),
    "mindformers_1.8_cpu_healthy.log": Case(
        "healthy", None, "tiny Llama, 120 steps", "MindFormers 1.8 on a CPU"),
    "ms_epoch_time_ghostnet.log": Case(
        "healthy", None, "600 epochs; the first one compiles",
        f"{_MS_COURSES}: mindspore_Ghostnet"),
    "ms_facedetection_overflow_start.log": Case(
        "healthy", None, "three overflows at the start", f"{_MS_MODELS}/FaceDetection"),
    "ms_facerecognition_tensor_tuple.log": Case(
        "healthy", None, "loss 50 to 2", f"{_MS_MODELS}/FaceRecognition"),
    "ms_lossmonitor_appended_runs.log": Case(
        "healthy", None, "several runs in one file",
        "mindspore-lab/models: research/xidian/Frapple_EDCN"),
    "ms_nowcastnet_gan_noisy.log": Case(
        "healthy", None, "a GAN: loss between 1 and 27",
        "mindspore-ai/mindscience: MindEarth/applications/nowcasting"),
    "ms_rcnn_ssod_scale_collapse.log": Case(
        "faulty", (200, 300), "mean scale 8.4e6 to 51, 5 - 11 % overflows",
        f"{_MS_MODELS}/faster_rcnn_ssod"),
    "ms_segformer_scale_bounce.log": Case(
        "healthy", None, "scale 32768, once 65536", f"{_MS_MODELS}/Segformer"),
    "ms_ssc_data_starved.log": Case(
        "faulty", (1, 2), "88 % of the step waits for data", f"{_MS_MODELS}/ssc_resnet50"),
    "ms_transformer_tqdm_nan.log": Case(
        "faulty", (1582, 1582), "NaN in epoch 6, not stopped",
        "mindspore-courses/step_into_llm: Season1.step_into_chatgpt/1.Transformer"),
    "ms_yolov5_fps_lr.log": Case(
        "healthy", None, "loss 8635 to 260", f"{_MS_COURSES}: MindSpore-YOLOv5"),
    "ms_yolox_overflow_two_runs.log": Case(
        "either", (3, 3), "second run: loss 241 in one epoch",
        f"{_MS_COURSES}: mingspore-yolox", fault_run=1),
    "nanogpt_step_avg_nan_trap.log": Case(
        "healthy", None, "a mean step time of NaN that means nothing",
        f"{_MODDED}/2024-11-19_FlexAttention"),
    "tab_fairseq_1895_scale_underflow.csv": Case(
        "faulty", (695, 702), "scale below 1e-3, then the abort at 1e-4",
        "facebookresearch/fairseq issue 1895"),
    "tab_hallo_152_resume_nan.csv": Case(
        "faulty", (1, 2), "NaN from the first step after a resume",
        "fudan-generative-vision/hallo issue 152", fault_run=152),
    "tab_mindyolo_402_loss_jump.csv": Case(
        "faulty", (200, 300), "overflows still update; loss 9 to 8713",
        "mindspore-lab/mindyolo issue 402", fault_run=402),
    "tab_xtuner_187_gradnorm_nan_loss_fine.csv": Case(
        "either", (240, 240), "norm turns NaN, loss goes on", "InternLM/xtuner issue 187",
        fault_run=187),
}  # fmt: skip
"""File -> its known story."""
