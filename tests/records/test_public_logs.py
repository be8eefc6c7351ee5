"""Every public log that the survey knows, where a folder with them is named by MINDTUNE_LOGS."""

import os
from pathlib import Path

import pytest

from mindtune.controller.records.log_readers import read_log
from mindtune.experiments.replay.cases import CASES
from mindtune.experiments.replay.survey import markdown, survey

FOLDER = os.environ.get("MINDTUNE_LOGS")
needs_logs = pytest.mark.skipif(not FOLDER, reason="MINDTUNE_LOGS names no folder")

FACTS = {
    "ds_chat_reward_rank_duplicates.log": ("deepspeed", 1268, 184, 1),
    "ds_chat_rlhf_two_engines.log": ("deepspeed", 1050, 451, 1),
    "ds_chat_sft_dynamic_scale.log": ("deepspeed", 1336, 605, 1),
    "ds_zero_init_scale_too_high.log": ("deepspeed", 379, 250, 8),
    "fairseq_fsdp_13b_two_runs.log": ("fairseq", 28, 20, 2),
    "hf_grpo_zero_loss.trainer_state.json": ("hf_trainer_state", 1000, 1000, 1),
    "hf_lora_every_step_healthy.trainer_state.json": ("hf_trainer_state", 1028, 1028, 1),
    "hf_mistral_translator_one_spike.trainer_state.json": ("hf_trainer_state", 866, 866, 1),
    "hf_qlora_lr5_diverged.trainer_state.json": ("hf_trainer_state", 10, 10, 1),
    "hf_sft_early_gn_spike.trainer_state.json": ("hf_trainer_state", 120, 120, 1),
    "hf_speculator_isolated_gn_spikes.trainer_state.json": ("hf_trainer_state", 2000, 2000, 1),
    "hf_trocr_gradnorm_not_unscaled.trainer_state.json": ("hf_trainer_state", 707, 700, 1),
    "hf_whisper_bashkir_fp16.trainer_state.json": ("hf_trainer_state", 420, 400, 1),
    "hf_whisper_braj_lr_too_high.trainer_state.json": ("hf_trainer_state", 25, 5, 1),
    "llamafactory_resumed_duplicates.jsonl": ("llamafactory", 1360, 680, 2),
    "llmc_main_norm_lr.log": ("llm.c", 2000, 1992, 1),
    "meg_104b_tr8_spikes_diverged.log": ("megatron", 20, 19, 3),
    "meg_104b_tr8b_scale_collapse.log": ("megatron", 25, 19, 1),
    "meg_13b_tr1_spike_gn_zero.log": ("megatron", 10, 10, 1),
    "meg_176b_tr11_spike_recovered.log": ("megatron", 19, 18, 1),
    "meg_gpt2_16node_diverge_warmup.log": ("megatron", 62, 62, 1),
    "meg_gpt2_16node_ds_on_gn_zero.log": ("megatron", 49, 49, 1),
    "meg_gpt2_345m_healthy.log": ("megatron", 100, 100, 1),
    "mf_llama2_13b_first_steps.log": ("mindformers", 5, 5, 1),
    "mf_skip_by_global_norm_abort.log": ("mindformers", 6, 4, 2),
    "mindformers_1.8_cpu_healthy.log": ("mindformers", 120, 120, 1),
    "ms_epoch_time_ghostnet.log": ("mindspore_monitor", 600, 600, 1),
    "ms_facedetection_overflow_start.log": ("key_value", 8, 8, 1),
    "ms_facerecognition_tensor_tuple.log": ("key_value", 8, 8, 1),
    "ms_lossmonitor_appended_runs.log": ("mindspore_monitor", 1442, 1442, 4),
    "ms_nowcastnet_gan_noisy.log": ("mindspore_monitor", 2004, 2000, 1),
    "ms_rcnn_ssod_scale_collapse.log": ("key_value", 4, 4, 1),
    "ms_segformer_scale_bounce.log": ("key_value", 14, 14, 1),
    "ms_ssc_data_starved.log": ("key_value", 3, 3, 1),
    "ms_transformer_tqdm_nan.log": ("tqdm", 20, 10, 1),
    "ms_yolov5_fps_lr.log": ("key_value", 300, 300, 1),
    "ms_yolox_overflow_two_runs.log": ("key_value", 15, 15, 2),
    "nanogpt_step_avg_nan_trap.log": ("nanogpt", 1891, 1875, 1),
    "tab_fairseq_1895_scale_underflow.csv": ("csv", 4, 4, 1),
    "tab_hallo_152_resume_nan.csv": ("csv", 3, 3, 1),
    "tab_mindyolo_402_loss_jump.csv": ("csv", 4, 4, 1),
    "tab_xtuner_187_gradnorm_nan_loss_fine.csv": ("csv", 6, 6, 1),
}
"""File -> format, data lines, steps, segments."""


def test_every_known_log_has_its_facts():
    assert set(FACTS) == set(CASES)


@needs_logs
@pytest.mark.parametrize("name", sorted(FACTS))
def test_a_public_log_is_read_completely(name):
    path = Path(FOLDER) / name
    if not path.is_file():
        pytest.skip(f"{name} is not in the folder")
    log = read_log(path)
    segments = {o.run for o in log.observations}
    read = (log.format, log.records, len(log.observations), len(segments))
    assert read == FACTS[name]


@needs_logs
def test_replay_tells_healthy_from_faulty_and_keeps_its_hands_off_the_healthy():
    rows = list(survey(Path(FOLDER)))
    known = [row for row in rows if row.case.verdict != "either"]
    wrong = [row.name for row in known if row.case.verdict != row.output.verdict]
    assert len(wrong) <= len(known) // 12, wrong
    assert {r.name: r.actions for r in rows if r.case.verdict == "healthy" and r.actions} == {}
    assert len(markdown(rows).splitlines()) == len(rows) + 4
