"""Faults of attaching a model of Hugging Face, each test named by the id in known-faults.md."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading
import warnings
from types import MethodType

import pytest
import torch
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

import sconv_transformers
import sconv_transformers.generate as command
from sconv_transformers import attach, detach


class Turns:
    """A forward pre-hook that makes threads run in turn, from one convolution to the next."""

    def __init__(self, threads):
        self._alive = list(range(threads))
        self._changed = threading.Condition()
        self._me = threading.local()

    def begin(self, me):
        self._me.number = me
        with self._changed:
            self._changed.wait_for(lambda: self._alive[0] == me)

    def __call__(self, module, args):
        with self._changed:
            self._alive.append(self._alive.pop(0))
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._alive[0] == self._me.number)

    def end(self):
        with self._changed:
            self._alive.remove(self._me.number)
            self._changed.notify_all()


def in_turn(model, modules, calls):
    """Return what generate gives for each of ``calls``, one thread each, taking turns."""
    turns, results = Turns(len(calls)), [None] * len(calls)
    hooks = [module.register_forward_pre_hook(turns) for module in modules]

    def run(number):
        turns.begin(number)
        try:
            prompt, options = calls[number]
            results[number] = model.generate(prompt, do_sample=False, **options).tolist()
        except Exception as error:
            results[number] = error
        finally:
            turns.end()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for hook in hooks:
        hook.remove()
    return results


@pytest.mark.parametrize(
    "kinds", [["greedy"] * 2, ["lookup"] * 3, ["greedy", "lookup", "beams", "lookup"]]
)
def test_hf_1_threads_on_one_attached_model_get_the_tokens_of_stock(main_pair, ids, kinds):
    """In turn from convolution to convolution, so that every step meets the others' steps."""
    options = {
        "greedy": {"max_new_tokens": 9},
        "lookup": {"max_new_tokens": 14, "prompt_lookup_num_tokens": 3},
        "beams": {"max_new_tokens": 6, "num_beams": 2},
    }
    calls = [
        (ids(1, 6, seed=number).repeat(1, 2), options[kind]) for number, kind in enumerate(kinds)
    ]
    expected = [
        main_pair.stock.generate(prompt, do_sample=False, **chosen).tolist()
        for prompt, chosen in calls
    ]
    modules = [conv.module for conv in main_pair.attachment.convolutions]
    assert in_turn(main_pair.attached, modules, calls) == expected


def test_hf_1_verify_windows_that_another_thread_overwrote_are_not_committed(main_pair, ids):
    """Its verify step was prepared before ours, and went on after it."""
    outs = []
    prompts = [ids(1, 9, seed) for seed in (1, 2)]
    model, convolutions = main_pair.attached, main_pair.attachment.convolutions
    for seed, prompt in zip((3, 4), prompts, strict=True):
        cache = _recording(main_pair.stock)
        main_pair.stock(prompt, **_given(cache))
        cache.crop(-2)
        outs.append(main_pair.stock(ids(1, 3, seed), **_given(cache)).logits)
    caches = [_recording(model) for _ in prompts]

    def second_runs_whole(module, args):
        hook.remove()
        model(prompts[1], **_given(caches[1]))

    # After the first convolution of the first forward, and before its others.
    hook = convolutions[1].module.register_forward_pre_hook(second_runs_whole)
    model(prompts[0], **_given(caches[0]))
    for cache, seed, expected in zip(caches[::-1], (4, 3), outs[::-1], strict=True):
        cache.crop(-2)
        got = model(ids(1, 3, seed), **_given(cache)).logits
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


def test_hf_2_a_forward_that_the_instance_holds_reaches_the_pool(make_model, ids):
    """As accelerate leaves it behind, with hooks and after they were taken off."""
    model = make_model("lfm2")
    expected = model.generate(ids(1, 6), max_new_tokens=5, do_sample=False).tolist()
    for module in model.modules():
        if isinstance(module, Lfm2ShortConv):
            module._old_forward = MethodType(Lfm2ShortConv.forward, module)
            module.forward = lambda *args, _of=module, **kwargs: _of._old_forward(*args, **kwargs)
    attachment = attach(model)
    assert model.generate(ids(1, 6), max_new_tokens=5, do_sample=False).tolist() == expected
    assert attachment.counters.forwards == 5
    attachment.detach()
    assert model.generate(ids(1, 6), max_new_tokens=5, do_sample=False).tolist() == expected
    assert attachment.counters.forwards == 5


def test_hf_2_a_forward_that_is_not_known_is_refused(make_model):
    model = make_model("lfm2")
    module = model.model.layers[3].conv
    module.forward = lambda *args, **kwargs: None
    with pytest.raises(TypeError, match=r"model\.layers\.3\.conv has a forward of its own"):
        attach(model)
    del module.forward
    attach(model).detach()


@pytest.mark.parametrize("before", [True, False])
def test_hf_2_and_3_hooks_of_accelerate(make_model, ids, before):
    hooks = pytest.importorskip("accelerate.hooks", reason="requirements-dev.txt installs it")
    model = make_model("inkling")
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(ids(1, 6), **options).tolist()
    attachment = None if before else attach(model)
    for module in model.modules():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))
    attachment = attachment or attach(model)
    assert model.generate(ids(1, 6), **options).tolist() == expected
    assert attachment.counters.forwards == 5
    attachment.detach()
    assert model.generate(ids(1, 6), **options).tolist() == expected
    hooks.remove_hook_from_module(model, recurse=True)
    assert model.generate(ids(1, 6), **options).tolist() == expected
    with attach(model) as again:
        assert model.generate(ids(1, 6), **options).tolist() == expected
        assert again.counters.forwards == 5
    assert attachment.counters.forwards == 5


class Doubled(Lfm2ShortConv):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


def test_hf_4_a_subclass_of_a_convolution_is_refused_by_name(make_model, ids):
    model = make_model("lfm2")
    model.model.layers[1].conv.__class__ = Doubled
    with pytest.raises(TypeError, match=r"model\.layers\.1\.conv is a Doubled, a subclass of Lfm2"):
        attach(model)
    assert type(model.model.layers[3].conv) is Lfm2ShortConv


@pytest.mark.parametrize("drafts", [25, 35, 40])
@pytest.mark.parametrize("through_config", [False, True])
def test_hf_5_too_many_draft_tokens_are_refused_before_generation(
    new_pair, ids, drafts, through_config
):
    pair = new_pair("lfm2", max_rollback=24)
    options = {"prompt_lookup_num_tokens": drafts}
    if through_config:
        pair.attached.generation_config.prompt_lookup_num_tokens = drafts
        options = {}
    prompt = ids(1, 50).repeat(1, 2)
    with pytest.raises(ValueError, match=f"max_rollback=24: attach with max_rollback={drafts} or"):
        pair.attached.generate(prompt, max_new_tokens=60, do_sample=False, **options)
    assert pair.attachment.counters.forwards == 0


def test_hf_5_an_assistant_that_drafts_more_is_refused(new_pair, ids):
    pair = new_pair("lfm2", max_rollback=4)
    with pytest.raises(ValueError, match=r"assistant model=20 .*max_rollback=20 or more"):
        pair.attached.generate(ids(1, 5), max_new_tokens=9, assistant_model=pair.stock)
    assert pair.attachment.counters.forwards == 0


def test_hf_5_a_forward_with_more_drafts_says_so_before_it_runs(new_pair, ids):
    """What drafts without a number of its own, as a schedule that grows it."""
    pair = new_pair("lfm2", max_rollback=4)
    cache = _recording(pair.attached)
    pair.attached(ids(1, 3), **_given(cache))
    cache.crop(0)
    with pytest.raises(ValueError, match=r"verifies 7 draft tokens.*max_rollback=4"):
        pair.attached(ids(1, 8), logits_to_keep=8, **_given(cache))
    pair.attached(ids(1, 5), logits_to_keep=5, **_given(cache))


def test_hf_6_a_model_is_detached_without_its_handle(make_model, ids):
    model = make_model("lfm2")
    keys = [sorted(vars(module)) for module in model.modules()]
    expected = model.generate(ids(1, 5), max_new_tokens=5, do_sample=False).tolist()
    attach(model)
    gc.collect()
    with pytest.raises(ValueError, match=r"call sconv_transformers\.detach\(model\)"):
        attach(model)
    detach(model)
    detach(model)
    assert [sorted(vars(module)) for module in model.modules()] == keys
    assert not model._forward_pre_hooks
    with attach(model) as again:
        assert model.generate(ids(1, 5), max_new_tokens=5, do_sample=False).tolist() == expected
    assert again.counters.forwards == 5


def test_hf_6_a_copy_is_detached_and_attached_by_itself(new_pair, ids):
    pair = new_pair("inkling")
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = pair.stock.generate(ids(1, 5), **options).tolist()
    twin = copy.deepcopy(pair.attached)
    assert twin.generate.__self__ is twin
    detach(twin)
    assert twin.generate(ids(1, 5), **options).tolist() == expected
    assert pair.attachment.counters.forwards == 0
    own = attach(twin)
    assert twin.generate(ids(1, 5), **options).tolist() == expected
    assert pair.attached.generate(ids(1, 5), **options).tolist() == expected
    assert own.counters.forwards == pair.attachment.counters.forwards == 5
    pair.attachment.detach()
    assert own.attached
    loaded = pickle.loads(pickle.dumps(pair.attached))
    assert loaded.generate(ids(1, 5), **options).tolist() == expected


@pytest.mark.parametrize("first", ["compile", "attach"])
def test_hf_7_a_compiled_model_is_attached(make_model, ids, first):
    model = make_model("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"])
    expected = model(ids(1, 6)).logits[:, -1].argmax(-1)
    tokens = model.generate(ids(1, 6), max_new_tokens=4, do_sample=False).tolist()
    attachment = attach(model) if first == "attach" else None
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(ids(1, 6)).logits[:, -1].argmax(-1), expected)
    if attachment is None:
        attachment = attach(compiled)
    before = attachment.counters.forwards
    assert torch.equal(compiled(ids(1, 6)).logits[:, -1].argmax(-1), expected)
    assert attachment.counters.forwards == before + 1
    assert compiled.generate(ids(1, 6), max_new_tokens=4, do_sample=False).tolist() == tokens
    assert attachment.counters.forwards == before + 5
    detach(compiled)
    assert not attachment.attached
    assert torch.equal(compiled(ids(1, 6)).logits[:, -1].argmax(-1), expected)
    assert attachment.counters.forwards == before + 5
    torch.compiler.reset()


def test_hf_7_a_model_with_adapters_of_peft_is_attached(make_model, ids):
    # Its own use of a name that transformers deprecated.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    peft = pytest.importorskip("peft", reason="requirements-dev.txt installs it")
    config = peft.LoraConfig(
        r=2, target_modules=["in_proj", "q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(3)
    model = peft.get_peft_model(make_model("lfm2"), config).eval()
    prompt = ids(1, 6)
    plain = model.get_base_model().generate
    with model.disable_adapter():
        without = plain(prompt, max_new_tokens=8, do_sample=False).tolist()
    expected = model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False).tolist()
    assert expected != without
    attachment = attach(model)
    got = model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False).tolist()
    assert got == expected
    assert attachment.counters.forwards == 8
    detach(model)
    assert not attachment.attached


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_rollback": -1}, "max_rollback=-1: expected an int of 0 or more"),
        ({"max_requests": 0}, "max_requests=0: expected an int of 1 or more"),
        ({"max_requests": 2.5}, "max_requests=2.5: expected an int"),
    ],
)
def test_hf_8_sizes_are_refused_in_the_words_of_attach(make_model, options, says):
    with pytest.raises(ValueError, match=says):
        attach(make_model("lfm2"), **options)


def test_hf_8_the_package_and_the_attachment_say_what_they_are(make_model):
    assert {"Attachment", "Counters", "attach", "detach", "__version__"} <= set(
        dir(sconv_transformers)
    )
    assert sconv_transformers.__version__.count(".") == 2
    attachment = attach(make_model("lfm2"), "cpu", max_requests=3)
    assert repr(attachment) == (
        "<sconv_transformers.Attachment of Lfm2ForCausalLM to 'cpu' on cpu, 0 of 3 rows held>"
    )
    attachment.detach()
    assert repr(attachment) == "<sconv_transformers.Attachment of Lfm2ForCausalLM, detached>"


def test_hf_8_another_release_of_transformers_is_one_line(make_model, monkeypatch, capsys):
    monkeypatch.setattr("sconv_transformers.transformers_range.version", lambda name: "5.17.0")
    says = r"works with transformers <5\.25,>=5\.22, found 5\.17\.0: pip install"
    with pytest.raises(RuntimeError, match=says):
        attach(make_model("lfm2"))
    assert command.main(["--prompt", "a"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "found 5.17.0" in captured.err


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("as_json", [False, True])
def test_hf_9_no_code_of_a_model_runs(make_model, tmp_path, capsys, monkeypatch, file, as_json):
    """Also where somebody would answer yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    make_model("lfm2").save_pretrained(tmp_path)
    path, ran = tmp_path / file, tmp_path / "ran"
    content = json.loads(path.read_text()) if path.exists() else {}
    entry = ["model.Own", None] if "tokenizer" in file else "model.Own"
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    content["auto_map"] = dict.fromkeys(names, entry)
    if file == "config.json":
        content["model_type"] = "a_model_of_its_own"
    path.write_text(json.dumps(content))
    (tmp_path / "model.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n")
    arguments = ["--model", str(tmp_path), "--prompt", "a", *(["--json"] if as_json else [])]
    capsys.readouterr()
    assert command.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert not ran.exists()
    if file == "config.json":
        assert "code from the model's own files, which this command never runs" in captured.err


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx"])
def test_hf_10_packed_sequences_with_a_cache_are_refused(new_pair, ids, name):
    pair = new_pair("lfm2")
    value = torch.tensor([0, 3, 6], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"{name} packs several sequences"):
        pair.attached(ids(1, 6), use_cache=True, **{name: value})


def _recording(model):
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    return cache


def _given(cache):
    return {"cache": cache}
