"""Lines that name their values, progress bars and tables, as their programs print them."""

import math

import pytest

from mindtune.controller.contract import SignalRow, format_header, format_row
from mindtune.controller.records.log_readers import open_log, read_log
from mindtune.controller.records.log_readers.key_value import parse_line
from mindtune.policies.signals import Observation


@pytest.fixture
def read(tmp_path):
    """Return a function that reads a text as a log."""

    def read_text(text, name="log"):
        path = tmp_path / name
        path.write_text(text)
        return read_log(path)

    return read_text


def column(log, name):
    return [getattr(o, name) for o in log.observations]


LINES = [
    (("Epoch 12/200, step:100/1487, loss:0.08269882, overflow:False, loss_scale:32768.0, step "
     "cost:182ms"),
     (12, 100), {"loss": 0.08269882, "overflow": 0.0, "loss_scale": 32768.0, "step_time_s": 0.182}),
    (("2022-11-07 04:49:33,048:INFO:epoch[2], iter[1], loss:5757.334432, fps:14.69 imgs/sec, "
     "lr:0.00014583, per step time: 544.7433789571127ms"),
     (2, 1), {"loss": 5757.334432, "learning_rate": 0.00014583, "step_time_s": 0.5447433789571127}),
    (("rank[0], iter[3], loss[27250.805], overflow:True, loss_scale:256.0, lr:6.25e-06, "
     "batch_images:(64, 3, 448, 768)"),
     (None, 3), {"loss": 27250.805, "overflow": 1.0, "loss_scale": 256.0, "learning_rate": 6.25e-6}),
    (("epoch[0], iter[100], loss:(Tensor(shape=[], dtype=Float32, value= 50.2733), Tensor(shape=[], "
     "dtype=Bool, value= True), Tensor(shape=[], dtype=Float32, value= 32768)), cur_lr:0.000660, "
     "mean_fps:743.09 imgs/sec"),
     (0, 100), {"loss": 50.2733, "overflow": 1.0, "loss_scale": 32768.0, "learning_rate": 0.00066}),
    (("2022-11-10 11:01:27,701.701 INFO rank_id:0, step: 100, avg loss: 1.59982, rpn_cls_loss: 0.69, "
     "iter_time: 0.305, data_time: 0.088, overflow: 0.110000, scaling_sens: 100024.32, lr: 0.00125"),
     (None, 100), {"loss": 1.59982, "step_time_s": 0.305, "data_time_s": 0.088, "overflow": 0.11,
                   "loss_scale": 100024.32, "learning_rate": 0.00125}),
    (("INFO -  rank: 0, epoch:   1, step:    0, loss_x: 6.758, loss_u: 0.000, batch_time: 4.34, "
     "data_time: 3.82, lr: 0.010028, overflow: 0.00000, scaling_sens: 65536."),
     (1, 0), {"step_time_s": 4.34, "data_time_s": 3.82, "learning_rate": 0.010028,
              "overflow": 0.0, "loss_scale": 65536.0}),
    (("2022-11-10 14:24:35,334:INFO:epoch: 3 epoch time 165.28s loss: 24.1893, overflow: True, "
     "scale: 262144"),
     (3, None), {"loss": 24.1893, "overflow": 1.0, "loss_scale": 262144.0}),
    (("Epoch 1/300, Step 100/3995, imgsize (640, 640), loss: 11.6707, lbox: 1.6, lcls: 8.7, "
     "cur_lr: [0.09924905, 0.0, 0.0]"),
     (1, 100), {"loss": 11.6707, "learning_rate": 0.09924905}),
    ("Epoch 1/300, Step 100/3995, step time: 654.40 ms",
     (1, 100), {"step_time_s": 0.6544}),
    (("[titan] 2025-01-01 10:00:00,000 - root - INFO - step: 10  loss: 12.2504  grad_norm:  3.3120  "
     "memory: 20.06GiB(25.32%)  tps: 1,234  tflops: 20.10  mfu: 12.50%"),
     (None, 10), {"loss": 12.2504, "grad_norm": 3.312, "mfu": 0.125}),
    ("step   250 | loss: 6.123 | lr 6.00e-04 | norm: 0.31 | dt: 384.00ms | tok/sec: 1365333.12",
     (None, 250), {"loss": 6.123, "learning_rate": 6e-4, "grad_norm": 0.31, "step_time_s": 0.384,
                   "tokens_per_s": 1365333.12}),
    ("step 20, loss: 1.97", (None, 20), {"loss": 1.97}),
    (
        ("2023-10-25 10:00:00 - mmengine - INFO - Epoch(train)  [2][240/735]  lr: 1.9813e-04  eta: "
        "1:23:45  time: 2.8874  data_time: 0.0042  memory: 9000  loss: 2.5128  grad_norm: nan"),
        (2, 240),
        {"loss": 2.5128, "grad_norm": math.nan, "learning_rate": 1.9813e-4, "step_time_s": 2.8874,
         "data_time_s": 0.0042},
    ),
    (("2023-06-01 - mmdet - INFO - Epoch [3][50/7330]\tlr: 1.9e-02, eta: 3:27:42, time: 0.56, "
     "data_time: 0.06, memory: 4000, loss: 2.5, grad_norm: 9.0"), (3, 50),
     {"loss": 2.5, "grad_norm": 9.0, "learning_rate": 0.019, "step_time_s": 0.56,
      "data_time_s": 0.06}),
    ("Iter(train) [ 10/500]  lr: 2e-05  loss: 1.5", (None, 10),
     {"loss": 1.5, "learning_rate": 2e-5}),
    (
        ("epoch: 0.0, current epoch percent: 0.003, step: 100, outputs are (Tensor(shape=[], "
        "dtype=Float32, value= 9.6), Tensor(shape=[], dtype=Bool, value= False), Tensor(shape=[], "
        "dtype=Float32, value= 65536))"),
        (None, 100),
        {"loss": 9.6, "overflow": 0.0, "loss_scale": 65536.0},
    ),
    ("local_rank: 0, epoch: 1, step: 2, output is 10.5, overflow is False, loss scale is 1024.0",
     (1, 2), {"loss": 10.5, "overflow": 0.0, "loss_scale": 1024.0}),
    ("mindcv.utils.callbacks INFO - Epoch: [1/5], batch: [100/196], loss: 6.93, lr: 0.05",
     (1, 100), {"loss": 6.93, "learning_rate": 0.05}),
    ("epoch:[  0/ 90], step:[  100/ 5004], loss:[6.93/6.95], time:[123.4], lr:[0.1]",
     (0, 100), {"loss": 6.93, "learning_rate": 0.1}),
    ("epoch: 1 step: [10/1849], loss: 12.3, overflow: False, scale: 65536, avg step time: 153.5 ms",
     (1, 10), {"loss": 12.3, "overflow": 0.0, "loss_scale": 65536.0, "step_time_s": 0.1535}),
    ("iteration = 7; train_loss = nan; lr=[1e-05, 2e-05]", (None, 7),
     {"loss": math.nan, "learning_rate": 1e-5}),
    ("step: 5, box loss: 0.5, cls loss: 1.0, total loss: 2.5", (None, 5), {"loss": 2.5}),
    ("step: 5, box loss: 0.5", (None, 5), {}),
    ("epoch: 3, val loss: 2.5, acc: 0.7", (3, None), {"eval_loss": 2.5}),
    ("step: 6, Loss: -inf, Overflow: true", (None, 6), {"loss": -math.inf, "overflow": 1.0}),
    ("Epoch: [0][  10/5005]\tTime  0.314 ( 0.912)\tLoss 7.01e+00 (7.04e+00)\tAcc@1 0.0 ( 0.1)",
     (0, 10), {"loss": 7.01}),
    ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.213470", (1, 640), {"loss": 2.21347}),
    (("Train: 0 [  50/1251 (  4%)]  Loss: 6.91 (6.92)  Time: 0.512s, 2000/s (0.612s, 1673/s)  LR: "
      "1.000e-05  Data: 0.010 (0.050)"), (0, 50), {"loss": 6.91, "learning_rate": 1e-5}),
    ("INFO: epoch 1 step 10, loss 0.512, lr 1e-05, step time 1234.5 ms", (1, 10),
     {"loss": 0.512, "learning_rate": 1e-5, "step_time_s": 1.2345}),
    (("step:2 - actor/pg_loss:np.float64(-0.02) - actor/grad_norm:np.float64(0.4) - "
      "timing_s/step:11.5"), (None, 2), {"loss": -0.02, "grad_norm": 0.4, "step_time_s": 11.5}),
    (("Training epoch 0, iteration 1/99 | lr: 2.9e-07 | global_batch_size: 512 | global_step: 5 | "
      "reduced_train_loss: 11.02 | train_step_timing in s: 5.85"), (0, 5),
     {"loss": 11.02, "learning_rate": 2.9e-7, "global_batch_size": 512, "step_time_s": 5.85}),
    ("epoch\uff1a1\uff0cstep\uff1a5\uff0closs\uff1a2.5", (1, 5), {"loss": 2.5}),
    ("iter 10 step 10 | loss train: 2.5, val: n/a | iter time: 123.45 ms (step)", (None, 10),
     {"loss": 2.5, "step_time_s": 0.12345}),
    ("validate step: 10  loss: 11.5  memory: 20GiB(3%)  tps: 1,234", (None, 10),
     {"eval_loss": 11.5}),
    ("step: 7 loss: nan(ind) grad_norm: 1.#INF lr: -1.#IND", (None, 7),
     {"loss": math.nan, "grad_norm": math.inf, "learning_rate": math.nan}),
    ("step: 1,234 loss: 2.5 grad_norm: 1,234.5", (None, 1234), {"loss": 2.5, "grad_norm": 1234.5}),
    ("step: 5 loss: tensor(2.5, device='cuda:0', grad_fn=<NllLossBackward0>)", (None, 5),
     {"loss": 2.5}),
    ("step: 5, loss: 2.5{ step: 6", (None, 5), {}),
    ("step: 5, loss: 2.\ufffd5, lr: 0.1", (None, 5), {"learning_rate": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "counts", "signals"), LINES, ids=lambda value: str(value)[:32])
def test_a_line_names_its_values_with_their_units(line, counts, signals):
    named = parse_line(line)
    assert (named.epoch, named.step) == counts
    assert named.signals == pytest.approx(signals, nan_ok=True)


def test_steps_count_on_over_epochs_however_they_are_told(read):
    log = read("".join(f"Epoch {epoch}/9, step:{step}/50, loss:1.5\n"
                       for epoch in (1, 2) for step in (25, 50)))  # fmt: skip
    assert column(log, "step") == [25, 50, 75, 100]
    log = read("".join(f"epoch: {epoch}, step: {step}, loss: 1.5\n"
                       for epoch in (0, 1) for step in (0, 1, 2)))  # fmt: skip
    assert column(log, "step") == [0, 1, 2, 3, 4, 5]
    log = read("".join(f"epoch: {epoch}, step: 0, loss: 1.5\n" for epoch in (0, 1, 2)))
    assert column(log, "step") == [0, 1, 2]
    log = read("epoch[0], iter[100], loss:5.0\nepoch[8], iter[27300], loss:2.0\n")
    assert column(log, "step") == [100, 27300], "counted on by the program itself"


def test_brackets_of_others_are_not_those_of_mindformers(read):
    log = read("".join(f"mindocr.train INFO - epoch: [{epoch}/9], step: [{step}/50], loss: 1.5, "
                       "per step time: 123.4 ms\n" for epoch in (1, 2) for step in (25, 50)))  # fmt: skip
    assert (log.format, column(log, "step")) == ("key_value", [25, 50, 75, 100])
    assert column(log, "step_time_s") == pytest.approx([0.1234] * 4)


def test_two_lines_of_one_step_are_one(read):
    log = read(
        "Epoch 1/300, Step 100/3995, loss: 11.67, cur_lr: [0.1, 0.0]\n"
        "Epoch 1/300, Step 100/3995, step time: 654.40 ms\n"
        "overflow, still update, loss scale adjust to 1024.0\n"
        "Epoch 1/300, Step 200/3995, loss: 8712.5, cur_lr: [0.1, 0.0]\n"
        "overflow, drop step, loss scale adjust to 512.0\n"
        "Epoch 1/300, Step 300/3995, loss: 9.5, cur_lr: [0.1, 0.0]\n"
    )
    first, second, third = log.observations
    assert (first.loss, first.step_time_s, first.overflow) == (11.67, pytest.approx(0.6544), None)
    assert (second.overflow, second.update_skipped, second.loss_scale) == (1.0, 0.0, 1024.0)
    assert (third.overflow, third.update_skipped) == (1.0, 1.0)


def test_the_printed_scale_is_told_apart_from_the_one_that_acted(read):
    line = "iter[{}], loss[2.5], overflow:{}, loss_scale:{}\n".format
    before = read(line(0, False, 1024) + line(1, True, 1024) + line(2, True, 512)
                  + line(3, False, 256))  # fmt: skip
    assert column(before, "loss_scale") == [1024, 1024, 512, 256], "printed before the cut"
    after = read(line(0, False, 1024) + line(1, True, 512) + line(2, True, 256)
                 + line(3, False, 256))  # fmt: skip
    assert column(after, "loss_scale") == [1024, 1024, 512, 256], "printed after the cut"


def test_olmo_core_and_composer_values_stand_below_their_step(read):
    log = read(
        "console_logger:66 INFO [step=1/???,epoch=1,eta=1 day, 2:00:00]\n    train/CE loss=11.42\n"
        "    optim/total grad norm=1.520\n    optim/LR (group 0)=0.0004\n"
        "    optim/step skipped=1.0\n    train/Z loss=9.0\n"
        "console_logger:66 INFO [step=500/1000,epoch=2,eta=1 day]\n    train/CE loss=11.40\n"
        "    optim/total grad norm=1,234\n"
    )
    first, second = log.observations
    assert (first.step, first.loss, first.grad_norm, first.learning_rate) == (1, 11.42, 1.52, 4e-4)
    assert first.update_skipped == 1.0
    assert (second.step, second.loss, second.grad_norm) == (500, 11.4, 1234.0)
    log = read(
        "[epoch=0][batch=1/100]:\n\t Train time/epoch: 0\n\t Train loss/train/total: 10.8\n"
        "[epoch=0][batch=2/100]:\n\t Train loss/train/total: 10.7\n"
    )
    assert [(o.step, o.loss) for o in log.observations] == [(1, 10.8), (2, 10.7)]


def test_a_summary_of_an_epoch_is_no_step_where_there_are_steps(read):
    log = read("".join(f"epoch: {epoch}, step: {step}, loss: {5 - step}\n" * (step < 3)
                       or f"epoch: {epoch}, avg loss: 3.5, epoch time: 20 s\n"
                       for epoch in (1, 2) for step in (1, 2, 3)))  # fmt: skip
    assert [(o.run, o.step, o.loss) for o in log.observations] == [
        (0, 1, 4), (0, 2, 3), (0, 3, 4), (0, 4, 3),
    ]  # fmt: skip


def test_steps_that_count_on_over_epochs_are_not_counted_on_again(read):
    log = read("".join(f"Epoch {1 + step // 100}, step {step}/300, loss: 1.5\n"
                       for step in range(50, 300, 50)))  # fmt: skip
    assert column(log, "step") == [50, 100, 150, 200, 250]


def test_olmo_values_stand_below_their_step(read):
    log = read(
        "2024-01-01 10:00:00 INFO [olmo.train:967, rank=0] [step=10/739328,epoch=0]\n"
        "    optim/total_grad_norm=1.52\n    train/CrossEntropyLoss=11.42\n"
        "    throughput/device/tokens_per_second=8,000\n"
        "2024-01-01 10:00:09 INFO [olmo.train:967, rank=0] [step=11/739328,epoch=0]\n"
        "    train/CrossEntropyLoss=nan\n"
    )
    assert column(log, "step") == [10, 11]
    assert column(log, "grad_norm") == [1.52, None]
    assert column(log, "loss")[0] == 11.42
    assert math.isnan(column(log, "loss")[1])


def test_progress_bars_of_epochs_and_of_evaluation(read):
    log = read(
        "Epoch: 0: 100%|##########| 226/226 [01:58<00:00,  2.00it/s, loss=4.45]\n"
        "100%|##########| 8/8 [00:00<00:00, 13.00it/s, loss=3.33]\n"
        "Epoch: 1:  50%|#####     | 113/226 [00:44<00:00,  4.00s/it, loss=2.91, lr=0.001]\r"
        "Epoch: 1: 100%|##########| 226/226 [00:44<00:00,  4.00s/it, loss=nan]\n"
        "val: 100%|##########| 8/8 [00:00<00:00, 13.00it/s, loss=nan]\n"
    )
    assert (log.format, log.records) == ("tqdm", 5)
    assert column(log, "step") == [226, 339, 452]
    assert column(log, "loss")[:2] == [4.45, 2.91]
    assert math.isnan(column(log, "loss")[2])
    assert column(log, "step_time_s") == [0.5, 4.0, 4.0]
    assert column(log, "eval_loss")[:2] == [3.33, None]
    assert math.isnan(column(log, "eval_loss")[2])
    assert column(log, "learning_rate") == [None, 0.001, None]


def test_a_bar_between_lines_of_a_loss_scaler(read):
    log = read(
        "Steps:   0%|          | 1/30000 [00:14<99:00, 14.89s/it, lr=1e-05, step_loss=0.5]\n"
        "[2024-01-01 00:00:00] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: "
        "262144, reducing to 131072\n"
        "Steps:   0%|          | 2/30000 [00:23<74:00,  8.94s/it, lr=1e-05, step_loss=nan]\n"
    )
    assert (log.format, column(log, "step")) == ("tqdm", [1, 2])
    assert column(log, "overflow") == [None, 1.0]
    assert column(log, "loss_scale") == [None, 262144.0]
    assert column(log, "loss")[0] == 0.5
    assert math.isnan(column(log, "loss")[1])


def test_a_table_of_another_program(read):
    log = read(
        "# exported\nevent,epoch,num_updates,loss,gnorm,loss_scale,lr,step_time_ms,note\n"
        'log,3,700,9.44,156.0,0,1e-4,250,"a, b"\n'
        "overflow,3,,,,0.25,,,\n"
        "log,3,702,nan,inf,0.125,1e-4,,\n"
        "abort,3,,,,,,,\n"
        "log,3,x,1,2,3,4,5,6\n"
        "log,3,703,9.\n"
    )
    assert (log.format, log.records) == ("csv", 3)
    assert column(log, "step") == [700, 701, 702]
    assert column(log, "overflow") == [None, 1.0, None]
    assert column(log, "step_time_s") == [0.25, None, None]
    assert column(log, "loss_scale") == [0.0, 0.25, 0.125]
    assert math.isnan(column(log, "loss")[2])
    assert column(log, "grad_norm")[2] == math.inf


def test_tables_with_other_separators_and_truth_values(read):
    log = read("step\tloss\toverflow\n1\t2.5\tTrue\n2\t2.25\tFalse\n")
    assert column(log, "overflow") == [1.0, 0.0]
    assert column(read("step;loss\n1;2.5\n2;2.25\n"), "loss") == [2.5, 2.25]


def test_own_signals_are_read_back_whole(tmp_path):
    observations = [
        Observation(step=1, phase="compile", run=0, loss=2.5, step_time_s=9.5, tokens=512),
        Observation(step=2, phase="train", run=0, loss=math.inf, loss_scale=2.0**15),
        Observation(step=2, phase="train", run=1, loss=2.25, straggler_rank=0, mfu=0.4),
    ]
    text = format_header() + "".join(format_row(SignalRow(o)) for o in observations)
    (tmp_path / "signals.csv").write_text(text + "3,1.0,tra")
    log = open_log(tmp_path)
    assert log.format.name == "mindtune"
    assert list(log) == observations
