"""``sconv generate``: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
import transformers
from transformers import ByT5Tokenizer

import sconv
import sconv_transformers.generate as command
from sconv_transformers.conv_hook import ConvHook
from sconv_transformers.report import Difference

COUNTS = ("layers", "streams", "steps", "metadata_builds", "drafted", "accepted", "new_tokens")


@pytest.fixture
def folder(make_model, tmp_path):
    """Save a tiny byte-level model: ``folder("inkling")``."""

    transformers.logging.disable_progress_bar()

    def make(name: str = "inkling", **changes) -> str:
        model = make_model(name, vocab_size=259, eos_token_id=1, **changes)
        # A random model would end its text at once; these prompts shall run to their limit.
        model.generation_config.eos_token_id = None
        path = tmp_path / name
        model.save_pretrained(path)
        ByT5Tokenizer(extra_ids=0).save_pretrained(path)
        return str(path)

    return make


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """A local folder is enough: any connection is a failure."""

    def refuse(*args):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def _json(capsys, *arguments):
    code = command.main([*arguments, "--json"])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, json.loads(captured.out)


def _table(text):
    rows = [line.split("  ", 1) for line in text.splitlines() if "  " in line]
    return {row[0].strip(): row[1].strip() for row in rows}


@pytest.mark.parametrize(("name", "layers", "streams"), [("inkling", 3, 4), ("lfm2", 2, 1)])
def test_json_is_one_object(folder, capsys, name, layers, streams):
    code, report = _json(
        capsys, "--model", folder(name), "--prompt", "def f(", "--max-new-tokens", "7"
    )
    assert code == 0
    assert [report[key] for key in COUNTS] == [layers, streams, 7, 7, 0, 0, 7]
    assert report["metadata_builds_per_step"] == 1.0
    assert (report["backend"], report["device"], report["dtype"]) == ("cpu", "cpu", "float32")
    assert report["state_bytes"] > 0
    assert report["compare"] is None
    [output] = report["outputs"]
    assert output["prompt"] == "def f("
    assert len(output["token_ids"]) == 7


def test_the_text_is_streamed_and_the_table_follows(folder, capsys, make_model):
    path = folder()
    assert command.main(["--model", path, "--prompt", "ab", "--max-new-tokens", "9"]) == 0
    out = capsys.readouterr().out
    model = make_model("inkling", vocab_size=259)
    model = type(model).from_pretrained(path).eval()
    tokenizer = ByT5Tokenizer.from_pretrained(path)
    ids = tokenizer("ab", add_special_tokens=False, return_tensors="pt").input_ids
    new = model.generate(ids, max_new_tokens=9, do_sample=False)[0, 2:]
    text = tokenizer.decode(new, skip_special_tokens=True)
    assert out.startswith("ab" + text + "\n\nbackend")
    table = _table(out.rpartition("\n\n")[2])
    assert table["backend"] == "cpu on cpu, float32"
    assert table["layers x streams"] == "3 x 4"
    assert table["steps"] == "9"
    assert table["metadata builds per step"] == "1.000"
    assert table["drafted / accepted"] == "no drafts"
    assert table["new tokens"] == "9"
    assert float(table["tokens per second"]) > 0


def test_several_prompts_are_one_batch(folder, capsys):
    path = folder()
    prompts = ["a", "def main():", "x = 1"]
    arguments = [word for prompt in prompts for word in ("--prompt", prompt)]
    code, report = _json(capsys, "--model", path, *arguments, "--max-new-tokens", "6", "--compare")
    assert code == 0
    assert (report["steps"], report["metadata_builds"], report["new_tokens"]) == (6, 6, 18)
    assert [output["prompt"] for output in report["outputs"]] == prompts
    for output in report["outputs"]:
        _, alone = _json(
            capsys, "--model", path, "--prompt", output["prompt"], "--max-new-tokens", "6"
        )
        assert alone["outputs"] == [output]
    assert command.main(["--model", path, *arguments, "--max-new-tokens", "3"]) == 0
    out = capsys.readouterr().out
    for number, prompt in enumerate(prompts, start=1):
        assert f"--- prompt {number} of 3 ---\n{prompt}" in out


def test_a_prompt_that_is_no_text_is_refused(capsys):
    """As a shell hands it over: bytes that are not UTF-8 come as lone surrogates."""
    with pytest.raises(SystemExit) as left:
        command.main(["--prompt", os.fsdecode(b"caf\xe9 = 1")])
    captured = capsys.readouterr()
    assert (left.value.code, captured.out) == (2, "")
    assert r"argument --prompt: 'caf\udce9 = 1' is not valid UTF-8" in captured.err


def test_a_prompt_is_utf_8_whatever_the_locale(folder, capsys):
    """A locale without UTF-8 hands over the same bytes as surrogates, one by one."""
    path = folder()
    text = "caf\xe9 \u20ac"
    given = text.encode().decode("ascii", "surrogateescape")
    assert given != text
    runs = [
        _json(capsys, "--model", path, "--prompt", prompt, "--max-new-tokens", "3")[1]["outputs"]
        for prompt in (text, given)
    ]
    assert runs[0] == runs[1]
    assert runs[0][0]["prompt"] == text


def test_json_is_ascii(folder, capsys):
    arguments = ["--model", folder(), "--prompt", "caf\xe9", "--max-new-tokens", "2", "--json"]
    assert command.main(arguments) == 0
    assert capsys.readouterr().out.isascii()


def test_drafts_are_counted(folder, capsys):
    path = folder()
    arguments = ["--model", path, "--prompt", "abcabcabcabc", "--max-new-tokens", "24", "--compare"]
    _, plain = _json(capsys, *arguments)
    code, report = _json(capsys, *arguments, "--draft", "prompt-lookup", "--draft-tokens", "3")
    assert code == 0
    assert report["outputs"] == plain["outputs"]
    assert report["drafted"] >= report["accepted"] >= 0
    assert report["drafted"] > 0
    assert report["steps"] + report["accepted"] == 24
    # Only the first forward, prompt and draft together, is longer than a verify step.
    assert report["metadata_builds"] == report["steps"] + 1


def test_drafts_of_several_prompts_run_one_by_one_and_it_says_so(folder, capsys):
    prompts = ["--prompt", "abab", "--prompt", "cdcd"]
    code = command.main(
        ["--model", folder(), *prompts, "--max-new-tokens", "5", "--draft", "prompt-lookup"]
    )
    captured = capsys.readouterr()
    assert code == 0
    assert "one by one" in captured.err
    assert "--- prompt 2 of 2 ---\ncdcd" in captured.out


def test_compare_reports_the_first_differing_token(folder, capsys, monkeypatch):
    convolve = ConvHook.convolve
    calls = iter(range(10**6))

    def wrong(self, *args, **kwargs):
        y = convolve(self, *args, **kwargs)
        # 12 convolutions a forward: right for 3 forwards, which is 3 tokens, and wrong then.
        return y if next(calls) < 36 else y.flip(-1)

    monkeypatch.setattr(ConvHook, "convolve", wrong)
    code, report = _json(
        capsys, "--model", folder(), "--prompt", "abc", "--max-new-tokens", "12", "--compare"
    )
    assert code == 1
    difference = report["compare"]["difference"]
    assert report["compare"]["equal"] is False
    assert difference["prompt"] == 0
    assert difference["position"] >= 3
    assert difference["sconv"] == report["outputs"][0]["token_ids"][difference["position"]]
    assert difference["sconv"] != difference["transformers"]


def test_compare_says_equal_in_the_table(folder, capsys):
    assert (
        command.main(
            ["--model", folder("lfm2"), "--prompt", "abc", "--max-new-tokens", "4", "--compare"]
        )
        == 0
    )
    assert _table(capsys.readouterr().out)["stock transformers"] == "equal"


def test_the_first_difference():
    assert Difference.first([[1, 2], [3]], [[1, 2], [3]]) is None
    assert Difference.first([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == Difference(1, 1, 4, 5)
    shorter = Difference.first([[1]], [[1, 2]])
    assert shorter == Difference(0, 1, None, 2)
    assert str(shorter) == (
        "prompt 1, new token 2: the end through sconv, token 2 through stock transformers"
    )


def test_sampling_repeats_with_its_seed(folder, capsys):
    path = folder()

    def run(*extra):
        code, report = _json(
            capsys, "--model", path, "--prompt", "ab", "--max-new-tokens", "12", *extra
        )
        assert code == 0
        return report["outputs"][0]["token_ids"]

    greedy = run()
    assert run("--sample", "--seed", "1") == run("--temperature", "1.0", "--seed", "1")
    assert run("--sample", "--seed", "1") != run("--sample", "--seed", "2")
    assert run("--temperature", "0.00001", "--seed", "5") == greedy


def test_a_text_ends_at_its_end_token(folder, capsys, make_model):
    path = folder()
    _, report = _json(capsys, "--model", path, "--prompt", "ab", "--max-new-tokens", "8")
    tokens = report["outputs"][0]["token_ids"]
    model = make_model("inkling", vocab_size=259)
    model = type(model).from_pretrained(path)
    model.generation_config.eos_token_id = tokens[3]
    model.save_pretrained(path)
    _, report = _json(capsys, "--model", path, "--prompt", "ab", "--max-new-tokens", "8")
    first = tokens.index(tokens[3])
    assert report["outputs"][0]["token_ids"] == tokens[: first + 1]
    assert report["new_tokens"] == first + 1


def _refused(capsys, *arguments):
    code = command.main(list(arguments))
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.startswith("sconv generate: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_folder_that_does_not_exist(capsys):
    text = _refused(capsys, "--model", "./no/such/folder", "--prompt", "a")
    assert "no model folder './no/such/folder'" in text


def test_a_folder_without_a_model(capsys, tmp_path):
    assert "cannot load the model" in _refused(capsys, "--model", str(tmp_path), "--prompt", "a")


def test_another_architecture(capsys, tmp_path):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = _refused(capsys, "--model", str(tmp_path), "--prompt", "a")
    assert "is LlamaForCausalLM: supported are InklingForCausalLM, Lfm2ForCausalLM" in text


def test_a_backend_that_is_not_installed(capsys, folder):
    text = _refused(capsys, "--model", folder(), "--prompt", "a", "--backend", "cpuu")
    assert "cpuu" in text
    assert "cpu" in text


def test_a_device_that_is_not_there(capsys, folder):
    text = _refused(capsys, "--model", folder(), "--prompt", "a", "--device", "cuda:77")
    assert "--device cuda:77" in text


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("meta", "--device meta: no installed backend serves 'meta' devices"),
        ("nonsense:1", "--device nonsense:1: no installed backend serves 'nonsense' devices"),
        ("cpu:x", "--device cpu:x: expected a device that torch knows, such as cpu or cpu:0"),
    ],
)
def test_a_device_that_no_backend_serves(capsys, device, says):
    assert says in _refused(capsys, "--prompt", "a", "--device", device)


def test_a_device_of_another_backend(capsys):
    text = _refused(capsys, "--prompt", "a", "--backend", "cpu", "--device", "npu")
    assert "--device npu: backend 'cpu' of sconv-plugin-cpu" in text
    assert "serves 'cpu' devices" in text


@pytest.mark.parametrize("device", [None, "acme"])
def test_a_plugin_whose_device_torch_does_not_know(capsys, monkeypatch, device):
    info = sconv.BackendInfo(
        name="acme",
        device_type="acme",
        contract=(1, 0),
        factory="builtins:dict",
        probe=lambda: sconv.Available(1),
    )
    monkeypatch.setattr("sconv.engine.loading.choose", lambda *args, **kwargs: (info, "", []))
    arguments = [] if device is None else ["--device", device]
    text = _refused(capsys, "--prompt", "a", *arguments)
    assert "torch" in text
    assert "acme" in text
    assert "Expected one of" not in text


@pytest.mark.parametrize(
    ("arguments", "first"),
    [
        ([], "start Python with TORCH_DEVICE_BACKEND_AUTOLOAD=0, or load CANN's set_env.sh"),
        (["--backend", "ascend"], "load CANN's set_env.sh, which the backend 'ascend' needs; for"),
        (["--device", "npu:0"], "load CANN's set_env.sh, which the backend 'ascend' needs; for"),
    ],
)
def test_a_torch_that_an_extension_keeps_from_starting(capsys, monkeypatch, arguments, first):
    def fail():
        raise RuntimeError("Failed to load the backend extension: torch_npu. You can disable")

    monkeypatch.delenv("SCONV_BACKEND", raising=False)
    monkeypatch.setattr("sconv.discovery.torch_failure._seen", {})
    monkeypatch.setattr("sconv_transformers.torch_extensions.hide_broken_extensions", fail)
    assert f"before sconv runs: {first}" in _refused(capsys, "--prompt", "a", *arguments)


def test_an_empty_prompt(capsys, folder):
    assert "empty" in _refused(capsys, "--model", folder(), "--prompt", "")


def test_the_default_model_may_be_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "files", lambda package: tmp_path)
    assert "default model is missing" in _refused(capsys, "--prompt", "a")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--prompt", "a", "--max-new-tokens", "0"],
        ["--prompt", "a", "--draft-tokens", "x"],
        ["--prompt", "a", "--temperature", "0"],
        ["--prompt", "a", "--draft", "telepathy"],
        ["--prompt", "a", "--compare", "--sample"],
    ],
)
def test_bad_options(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        command.main(arguments)
    assert caught.value.code == 2
    assert "usage: sconv generate" in capsys.readouterr().err


def test_help_needs_no_torch():
    script = (
        "import sys\n"
        "from sconv_transformers.generate import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as stop:\n    assert stop.code == 0\n"
        "heavy = {'torch', 'transformers', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--draft" in done.stdout


def test_the_command_is_found_through_its_entry_point(folder):
    [entry] = entry_points(group="sconv.commands", name="generate")
    assert entry.load() is command.main
    arguments = [
        "generate",
        "--model",
        folder(),
        "--prompt",
        "ab",
        "--max-new-tokens",
        "3",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "sconv", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["steps"] == 3


def test_float_types(folder, capsys):
    _, report = _json(
        capsys,
        "--model",
        folder(),
        "--prompt",
        "ab",
        "--max-new-tokens",
        "3",
        "--dtype",
        "bfloat16",
    )
    assert report["dtype"] == "bfloat16"
    assert torch.get_default_dtype() == torch.float32


def _truncated(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _not_safetensors(path):
    (path / "model.safetensors").write_bytes(b"\xff" * 4096)


def _empty(path):
    (path / "model.safetensors").write_bytes(b"")


def _pickle(path):
    torch.save({"x": torch.zeros(1)}, path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def _config(**values):
    def change(path):
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | values))

    return change


def _no_json(path):
    (path / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_truncated, "cannot load the model"),
        (_not_safetensors, "cannot load the model"),
        (_empty, "cannot load the model"),
        (_pickle, "pickles, which can run code and are never read"),
        (_no_json, "cannot load the model"),
        (_config(num_hidden_layers=10**9), ""),
        (_config(num_hidden_layers=-1), ""),
        (_config(hidden_size=0), ""),
        (_config(hidden_size=-32), ""),
        (_config(hidden_size="wide"), ""),
        (_config(hidden_size=10**7), ""),
        (_config(vocab_size=10**12), ""),
        (_config(conv_L_cache=100), ""),
        (_config(conv_L_cache=0), ""),
        (_config(conv_L_cache=None), ""),
        (_config(layer_types=["conv"]), ""),
        (_config(layer_types=7), ""),
        (_config(layer_types=["sideways"] * 4), ""),
        (_config(num_attention_heads=0), ""),
        (_config(num_key_value_heads=3), ""),
        (_config(eos_token_id="end"), ""),
        (_config(architectures=7), ""),
        (_config(model_type=["lfm2"]), ""),
        (_config(dtype="float7"), ""),
        (_config(norm_eps="small"), ""),
    ],
)
def test_cli_2_damaged_files_and_absurd_configs_are_one_line(
    folder, capsys, tmp_path, change, says
):
    path = folder("lfm2")
    capsys.readouterr()
    change(tmp_path / "lfm2")
    text = _refused(capsys, "--model", path, "--prompt", "a", "--max-new-tokens", "2")
    assert says in text
    assert "Traceback" not in text
