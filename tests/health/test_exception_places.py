"""What an exception's words leave open is told by the place where it was raised.

The logs are those of real failures, with frames left out.
"""
# ruff: noqa: E501 (logs)

from __future__ import annotations

import pytest

from homeostat.health.readers import read_text
from homeostat.health.vital_signs.last_exception import last_exception

SITE = "/data/venv/lib/python3.11/site-packages"
EMPTY_FILE = f"""\
Traceback (most recent call last):
  File "/data/run/train.py", line 5, in <module>
    state = torch.load("optimizer.pt")
            ^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "{SITE}/torch/serialization.py", line 1886, in _legacy_load
    magic_number = pickle_module.load(f, **pickle_load_args)
                   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "{SITE}/torch/_weights_only_unpickler.py", line 327, in load
    raise EOFError
EOFError
"""
OPTIMIZER_BEFORE_SHARDING = f"""\
step 0 loss 0.15084660053253174
step 1 loss 0.13114568591117860
[rank1]: Traceback (most recent call last):
[rank1]:   File "/data/run/train.py", line 19, in main
[rank1]:     state = get_optimizer_state_dict(model, opt)
[rank1]:             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
[rank1]:   File "{SITE}/torch/distributed/checkpoint/state_dict.py", line 960, in _get_optim_state_dict
[rank1]:     fqn = fqn_pid_mapping[key]
[rank1]:           ~~~~~~~~~~~~~~~^^^^^
[rank1]: KeyError: 0
"""
SHADOWED = f"""\
Traceback (most recent call last):
  File "/data/run/train.py", line 2, in <module>
    import torch
  File "{SITE}/torch/__init__.py", line 54, in <module>
    from torch._utils_internal import (
  File "/usr/lib/python3.11/tempfile.py", line 45, in <module>
    from random import Random as _Random
ImportError: cannot import name 'Random' from 'random' (/data/run/random.py)
"""
OTHER_VERSION = SHADOWED.replace("/data/run/random.py", "/usr/lib/python3.11/random.py")
REWARD_SERVER = f"""\
Traceback (most recent call last):
  File "{SITE}/httpcore/_backends/sync.py", line 126, in read
    return self._sock.recv(max_bytes)
           ^^^^^^^^^^^^^^^^^^^^^^^^^^
TimeoutError: timed out

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/data/run/train.py", line 6, in <module>
    score(["a"])
  File "/data/run/train.py", line 5, in score
    return httpx.post("http://127.0.0.1:29432/score", json={{"texts": texts}}, timeout=4).json()
           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "{SITE}/httpx/_transports/default.py", line 118, in map_httpcore_exceptions
    raise mapped_exc(message) from exc
httpx.ReadTimeout: timed out
"""
ENGINE = """\
Traceback (most recent call last):
  File "/data/run/train.py", line 6, in <module>
    generate("hello")
  File "/data/run/train.py", line 5, in generate
    return json.load(urllib.request.urlopen(req, timeout=5))
                     ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/urllib/request.py", line 1351, in do_open
    raise URLError(err)
urllib.error.URLError: <urlopen error [Errno 111] Connection refused>
"""
VARIABLE = """\
Traceback (most recent call last):
  File "/data/run/train.py", line 3, in out_dir
    def out_dir(): return os.environ["OUTPUT_DIR"]
                          ~~~~~~~~~~^^^^^^^^^^^^^^
  File "<frozen os>", line 679, in __getitem__
KeyError: 'OUTPUT_DIR'
"""
NAMESPACE = """\
Traceback (most recent call last):
  File "/data/run/train.py", line 6, in build
    return config.rollout.engine.name
           ^^^^^^^^^^^^^^
AttributeError: 'types.SimpleNamespace' object has no attribute 'rollout'
"""
EMPTY_SECTION = """\
Traceback (most recent call last):
  File "/data/run/train.py", line 54, in main
    rows = build(config.data.transforms.train, seed=config.seed)
AttributeError: 'NoneType' object has no attribute 'train'
"""
NO_SECTION = """\
Traceback (most recent call last):
  File "/data/run/config.py", line 54, in model
    return self.dic.get('model').copy()
AttributeError: 'NoneType' object has no attribute 'copy'
"""
SHADOWED_LOGGING = f"""\
Traceback (most recent call last):
  File "/data/run/train.py", line 2, in <module>
    import torch
  File "{SITE}/torch/_utils.py", line 1067, in <module>
    logger = logging.getLogger(__name__)
             ^^^^^^^^^^^^^^^^^
AttributeError: module 'logging' has no attribute 'getLogger'
"""
MESH = f"""\
Traceback (most recent call last):
  File "/data/run/train.py", line 8, in main
    print(mesh["dp_shard"])
  File "{SITE}/torch/distributed/device_mesh.py", line 984, in _get_slice_mesh_layout
    raise KeyError(
KeyError: "Invalid mesh_dim_names ('dp_shard',) specified. Valid mesh_dim_names are ['dp']."
"""
ROW_IS_NONE = f"""\
Traceback (most recent call last):
  File "/data/run/train.py", line 13, in <module>
    for b in DataLoader(Rows(), batch_size=4):
  File "{SITE}/torch/utils/data/_utils/collate.py", line 192, in <listcomp>
    key: collate([d[key] for d in batch], collate_fn_map=collate_fn_map)
                  ~^^^^^
TypeError: 'NoneType' object is not subscriptable
"""
WORKER_GONE = f"""\
Traceback (most recent call last):
  File "/data/run/train.py", line 11, in <module>
    for b in DataLoader(Rows(), batch_size=2, num_workers=1):
  File "{SITE}/torch/utils/data/dataloader.py", line 1291, in _try_get_data
    data = self._data_queue.get(timeout=timeout)
  File "{SITE}/torch/multiprocessing/reductions.py", line 538, in rebuild_storage_fd
    fd = df.detach()
  File "/usr/lib/python3.11/multiprocessing/resource_sharer.py", line 86, in get_connection
    c = Client(address, authkey=process.current_process().authkey)
  File "/usr/lib/python3.11/multiprocessing/connection.py", line 395, in _recv
    chunk = read(handle, remaining)
ConnectionResetError: [Errno 104] Connection reset by peer
"""
EXPERTS = f"""\
Traceback (most recent call last):
  File "{SITE}/vllm/model_executor/layers/quantization/flurb.py", line 493, in flurb_weight_loader
    param.data[expert_id, : shard_size // 2] = tensor
IndexError: index 100 is out of bounds for dimension 0 with size 64
"""

HUB = f"""\
Traceback (most recent call last):
  File "{SITE}/swift/dataset/loader.py", line 80, in load
    hub.exists(name)
  File "{SITE}/modelscope_hub/_download_control.py", line 140, in check
    raise _DownloadDeadlineError("E1001")
modelscope_hub._download_control._DownloadDeadlineError: [E1001]
"""
TEXT_IN_CHECK = f"""\
Traceback (most recent call last):
  File "{SITE}/verl/trainer/main_ppo.py", line 177, in main
    validate_config(
  File "{SITE}/verl/utils/config.py", line 124, in validate_config
    assert real_train_batch_size % minimal_bsz == 0, (
TypeError: not all arguments converted during string formatting
"""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (HUB, "hub-unreachable"),
        (TEXT_IN_CHECK, "setting-wrong-type"),
        (EMPTY_FILE, "checkpoint-file-damaged"),
        (OPTIMIZER_BEFORE_SHARDING, "optimizer-state-mismatch"),
        (SHADOWED, "package-shadowed"),
        (REWARD_SERVER, "reward-timeout"),
        (ENGINE, "inference-server-unresponsive"),
        (VARIABLE, "setting-missing"),
        (VARIABLE.replace("OUTPUT_DIR", "SLURM_NODEID"), "launcher-variables-missing"),
        (EXPERTS, "known-bad-version"),
        (NAMESPACE, "setting-missing"),
        (EMPTY_SECTION, "setting-missing"),
        (NO_SECTION, "setting-missing"),
        (
            NO_SECTION.replace("config.py", "a.py").replace("self.dic", "self.cfg"),
            "setting-missing",
        ),
        (SHADOWED_LOGGING, "package-shadowed"),
        (MESH, "unknown-setting"),
        (ROW_IS_NONE, "user-code-failed"),
        (WORKER_GONE, "dataloader-worker-failed"),
    ],
)
def test_the_place_names_what_the_words_leave_open(text: str, name: str) -> None:
    found = last_exception(read_text(text))
    assert found is not None
    assert found.likely is not None
    assert found.likely[0] == name


@pytest.mark.parametrize(
    "text",
    [
        OTHER_VERSION,
        EMPTY_SECTION.replace("train, seed", "train(), seed"),
        EMPTY_SECTION.replace("config.data.transforms", "self.transforms"),
        NO_SECTION.replace("config.py", "rows.py"),
        EXPERTS.replace(SITE, "/data/run").replace("vllm", "mine"),
        EMPTY_FILE.replace("torch/serialization.py", "wheel/x.py").replace(
            "torch/_weights_only_unpickler.py", "wheel/y.py"
        ),
        WORKER_GONE.replace("utils/data/dataloader.py", "multiprocessing/queue.py"),
        ENGINE.replace("in generate", "in main").replace('generate("hello")', "main()"),
    ],
)
def test_the_same_words_elsewhere_are_left_open(text: str) -> None:
    found = last_exception(read_text(text))
    assert found is not None
    assert found.place is None
