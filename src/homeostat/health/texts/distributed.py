"""Error texts of the family distributed: collectives, launchers, sharding, Ray, schedulers.

A collective that times out says only that ranks did not meet; why is in what the ranks did, or in
another rank's error. So the plain texts (timeout, lost peer, lost actor, failed child) are
inferred, and whatever names a reason explains them.
"""

from __future__ import annotations

from homeostat.health.finding import Cause, Confidence, Family, Level
from homeostat.health.texts import counts
from homeostat.health.texts.parts import AFTERMATH, READ_FIRST_ERROR, SHARD, advice, safe
from homeostat.health.texts.trouble import Trouble
from homeostat.health.view import RunView

TIMEOUTS = (
    "Watchdog caught collective operation timeout",
    "Caught collective operation timeout",
    "WorkNCCL(SeqNum=*before timing out",
    "Error: NCCL timeout",
    "Heartbeat monitor timed out! Process will be terminated",
    "ProcessGroupNCCL's watchdog got stuck",
    "Timed out waiting * for recv operation to complete",
    "Timed out waiting * for send operation to complete",
)
# Ascend's library of collectives: a rank that waits for another, and one that cannot reach it.
_HCCL_WAITS = (
    "EI0002 && Notify register times out",
    "The wait execution of the Notify register times out",
    "NPU error, error code is 107020",
    "HCCL watchdog && timeout",
    "WorkHCCL(SeqNum=*before timing out",
    "taskType[Notify Wait] && timeout",
)
_HCCL_CONNECTS = (
    "EI0006 && socket times out",
    "Getting socket times out",
    "hcclCommInitRootInfo && error code is 9",
)
# What ranks print that have no batch left while others do.
_RAN_OUT = (
    "DataLoader exhausted",
    "dataloader is exhausted",
    "data iterator exhausted",
    "rank && ran out of data",
    "rank && ran out of batches",
    "rank && has no more batches",
    "rank && no more batches",
    "rank && different number of batches",
    "rank && uneven number of batches",
    "rank && number of samples is inconsistent",
    "rank && StopIteration",
)
_ABORTED = (
    "NCCL communicator was aborted",
    "Some NCCL operations have failed or timed out",
    "remote process exited or there was a network error",
    "Connection closed by remote peer",
    "ncclRemoteError",
    'failed to check the "should dump" flag on TCPStore',
    "store->get('0') got error: Connection reset by peer",
    "store->get('0') got error: Socket Timeout",
    "Application timeout caused pair closure",
    "Connection closed by peer [",
    "sendBytes failed on SocketImpl",
    "recvValue failed on SocketImpl",
)
_ZERO3 = ("zero3", "zero_stage 3", "zero stage 3", "stage3.py", '"stage": 3', "zero-3", "zero_3")
# Faults of the card, not of the program that ran on it (13, 31, 43 and 45 are the program's).
_FATAL_XIDS = (48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140)
_MOE = ("SparseMoe", "MoeFor", "Mixtral", "-A3B", "-A22B", "DeepSeek-V2", "DeepSeek-V3")
DEBUG = advice(
    "TORCH_NCCL_TRACE_BUFFER_SIZE=2000, TORCH_DISTRIBUTED_DEBUG=DETAIL, NCCL_DEBUG=INFO",
    "Names the collective that each rank waits in, and checks that they agree.",
)
INTERFACE = advice(
    "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME: the interface that joins the nodes",
    "In a container the first one is often a bridge that the other node cannot reach "
    "(`ip addr` shows them).",
)


def _mixes_modes(view: RunView) -> bool:
    raw = view.raw_settings
    server = raw.get("vllm_server_host") or raw.get("vllm_server_base_url")
    said = view.log.has("vllm_mode: colocate", "vllm_mode=colocate", "vllm_mode colocate")
    served = view.log.has("vllm_server_host", "vllm_server_base_url")
    return (raw.get("vllm_mode") == "colocate" and bool(server)) or (said and served)


# Settings of engines inside the trainer; a server is given its own when it is started.
_COLOCATED_ONLY = (
    "vllm_gpu_memory_utilization",
    "vllm_tensor_parallel_size",
    "vllm_enable_sleep_mode",
    "vllm_data_parallel_size",
)


def _serves_colocated(view: RunView) -> bool:
    """Server mode, with settings that only colocated engines read."""
    last = {str(key).rpartition(".")[2]: value for key, value in view.raw_settings.items()}
    given = [name for name in _COLOCATED_ONLY if last.get(name) not in (None, False)]
    return str(last.get("vllm_mode", "")).strip("'\"") == "server" and bool(given)


TROUBLES: tuple[Trouble, ...] = (
    Trouble(
        code="ERR100",
        name="nccl-timeout",
        family=Family.DISTRIBUTED,
        confidence=Confidence.INFERRED,
        texts=TIMEOUTS,
        what="A collective operation timed out: not all ranks came to it.",
        why="Ranks that see other batches, take another branch or have died never meet the rest. "
        "Most often one rank has one batch less or more; a longer timeout only delays the end.",
        causes=(
            Cause("collective-mismatch-uneven-batches", "Usual reason of a stop in mid-run."),
            Cause("nccl-timeout", "A rank may also be slow, dead or unreachable."),
        ),
        fixes=(
            advice(
                "give every rank the same number of batches",
                "Drop the last incomplete one; ranks of one sequence- or tensor-parallel group "
                "must draw the same batch.",
                transformers="dataloader_drop_last",
                trl="dataloader_drop_last",
                verl="actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
            ),
            DEBUG,
            READ_FIRST_ERROR,
            safe(
                "cluster.timeout_s",
                "longer, only if one rank is legitimately slow",
                "Saving or tokenising on one rank may take long.",
                transformers="ddp_timeout",
                trl="ddp_timeout",
                axolotl="ddp_timeout",
                verl="actor_rollout_ref.nccl_timeout",
                slime="--distributed-timeout-minutes",
                miles="--distributed-timeout-minutes",
            ),
        ),
        explains=("ERR104", "ERR132", "ERR139", "ERR140", "ERR141"),
    ),
    Trouble(
        code="ERR101",
        name="collective-mismatch-uneven-batches",
        family=Family.DISTRIBUTED,
        texts=("WorkNCCL(SeqNum=",),
        when=counts.ranks_disagree,
        what="Ranks waited in different collectives: they no longer run the same program.",
        why="The operations that timed out differ in kind, size or number from rank to rank. "
        "Uneven batches, a branch on local data or a skipped step make ranks part ways; the "
        "network is not at fault.",
        fixes=(
            advice(
                "the same number of micro-batches on every rank",
                "Pad or drop; agree on skips with an all-reduce before acting on them.",
                transformers="dataloader_drop_last",
                trl="dataloader_drop_last",
                axolotl="pad_to_sequence_len=true",
            ),
            DEBUG,
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR102",
        name="collective-mismatch-uneven-batches",
        family=Family.DISTRIBUTED,
        texts=(
            "Detected mismatch between collectives on ranks",
            "Collectives differ in the following aspects",
            "Mismatch between collective operation types",
            "but Rank * is running collective",
            "Ranks * failed to pass monitoredBarrier",
            "failed to pass monitoredBarrier in",
            "Detected uneven inputs",
        ),
        what="Ranks called different collectives.",
        why="The debug checks compare what each rank is about to do; here they do not agree.",
        fixes=(
            advice("make every rank take the same branches", "Reduce the decision over all ranks."),
            advice(
                "the same number of batches per rank",
                "Drop or pad the last one.",
                transformers="dataloader_drop_last",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR103",
        name="slow-rank-zero-work",
        family=Family.DISTRIBUTED,
        confidence=Confidence.INFERRED,
        texts=TIMEOUTS,
        context=(
            "Running tokenizer on",
            "Tokenizing train dataset",
            "Map (num_proc=",
            "Saving model checkpoint to",
            "Saving the dataset (",
            "Generating train split",
            "Consolidating",
            "Preprocessing dataset",
            "Packing train dataset",
        ),
        within=30,
        unless=("Epoch 2/*0%|",),
        what="A collective timed out while one rank was still tokenising, saving or preparing "
        "data.",
        why="The others wait for it in a barrier; the default limit is 10 or 30 minutes.",
        causes=(
            Cause("slow-rank-zero-work", "That work stands right before the timeout."),
            Cause("nccl-timeout", "A rank may also have died there."),
        ),
        fixes=(
            advice(
                "prepare the data beforehand",
                "A cached, tokenised data set loads in seconds.",
                axolotl="dataset_prepared_path",
                llama_factory="tokenized_path",
            ),
            safe(
                "cluster.timeout_s",
                "longer than that work takes",
                "Here the limit itself is too short.",
                transformers="ddp_timeout",
                trl="ddp_timeout",
                axolotl="ddp_timeout",
                llama_factory="ddp_timeout",
            ),
            safe("data.num_processes", "higher", "Tokenises faster."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR104",
        name="peer-rank-died",
        family=Family.DISTRIBUTED,
        confidence=Confidence.HEURISTIC,
        texts=_ABORTED,
        what="A rank lost its partners: another one ended first.",
        why="This is the echo of a failure elsewhere. The rank that failed first has the reason.",
        causes=(
            Cause("peer-rank-died", "The connection was closed by the other side."),
            Cause("nccl-error", "If no rank reports anything else, look at the network."),
        ),
        fixes=(READ_FIRST_ERROR, DEBUG),
        explains=("ERR132", "ERR140", "ERR141"),
    ),
    Trouble(
        code="ERR105",
        name="nccl-error",
        family=Family.DISTRIBUTED,
        confidence=Confidence.INFERRED,
        texts=(
            "unhandled system error",
            "ncclSystemError",
            "ncclInternalError: Internal check failed",
            "internal error - please report this issue to the NCCL",
        ),
        what="NCCL could not set up or use a connection.",
        why="A system call failed: an interface that leads nowhere, a closed port, /dev/shm "
        "that is full, or a peer that is gone. NCCL_DEBUG=INFO prints which.",
        causes=(
            Cause("nccl-error", "NCCL reports a failed system call."),
            Cause("wrong-network-interface", "The usual reason across nodes."),
        ),
        fixes=(
            advice("NCCL_DEBUG=INFO", "Prints the call that failed, just before this error."),
            INTERFACE,
            advice("--shm-size=16g or --ipc=host", "On one node, /dev/shm is the usual reason."),
        ),
        explains=("ERR104", "ERR132", "ERR140"),
    ),
    Trouble(
        code="ERR106",
        name="nccl-error",
        family=Family.DISTRIBUTED,
        confidence=Confidence.INFERRED,
        texts=("unhandled cuda error", "ncclUnhandledCudaError"),
        what="A CUDA call inside NCCL failed.",
        why="The card is full, a former kernel left an error behind, peer access is refused, or "
        "the driver is older than NCCL needs.",
        causes=(
            Cause("nccl-error", "NCCL reports a failed CUDA call."),
            Cause("cuda-oom-training", "NCCL's buffers lie outside PyTorch's cache."),
        ),
        fixes=(
            advice("NCCL_DEBUG=INFO", "Prints the CUDA error, just before this one."),
            advice("nvidia-smi", "Is the card full, and is the driver as new as CUDA needs?"),
            advice("NCCL_CUMEM_ENABLE=0, NCCL_NVLS_ENABLE=0", "Rules out two frequent culprits."),
        ),
        explains=("ERR104", "ERR132", "ERR140"),
    ),
    Trouble(
        code="ERR107",
        name="two-ranks-one-gpu",
        family=Family.DISTRIBUTED,
        texts=(
            "Duplicate GPU detected",
            "ncclInvalidUsage",
            "same CUDA device * for multiple distinct roles",
            "is being used by multiple ranks",
            "using the same CUDA device",
        ),
        what="Two ranks of one communicator use the same GPU, which NCCL refuses.",
        why="CUDA_VISIBLE_DEVICES gives two processes the same card, ranks did not call "
        "set_device, or a rollout server shares its card with the trainer.",
        fixes=(
            advice(
                "one card per rank; keep the rollout server's cards out of the trainer's",
                "torchrun sets LOCAL_RANK: use it for set_device.",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR108",
        name="second-nccl-group-deadlock",
        family=Family.DISTRIBUTED,
        texts=(
            "start_worker_execution_loop. This might cause deadlock",
            "Error executing method*This might cause deadlock in distributed execution",
        ),
        context=(*TIMEOUTS, "broadcast weights", "init_process_group", "update_weight"),
        what="The engine's workers sat in a collective of their own while weights were sent over a "
        "second NCCL group: a deadlock.",
        why="Two NCCL groups on one card wait for each other when a kernel of the first is still "
        "open. The engine must leave its worker loop before an update.",
        causes=(
            Cause("second-nccl-group-deadlock", "The worker loop timed out during an update."),
            Cause("nccl-timeout", "That is what is seen."),
        ),
        fixes=(
            advice("upgrade vLLM", "Newer ones stop the worker loop before an update."),
            advice(
                "send weights over gloo, or CUDA IPC when colocated",
                "No second NCCL group, no deadlock.",
                openrlhf="--vllm.sync_backend=gloo",
            ),
            safe("sync.transport.type", "ipc or disk", "Neither needs a group with the engine."),
        ),
        explains=("ERR109", *AFTERMATH),
    ),
    Trouble(
        code="ERR109",
        name="second-nccl-group-deadlock",
        family=Family.DISTRIBUTED,
        confidence=Confidence.INFERRED,
        texts=TIMEOUTS,
        context=(
            "group_name=openrlhf",
            "group_name=weight",
            "broadcast weights to vllm",
            "in broadcast_to_vllm",
            "in update_weights_from_distributed",
            "in update_named_param",
            "in _broadcast_to_vllm",
        ),
        within=25,
        what="A collective timed out while weights were sent to the engine.",
        why="The group that joins trainer and engine is a second one on the same cards; an open "
        "collective of the first, or an engine that is still generating, blocks it.",
        causes=(
            Cause("second-nccl-group-deadlock", "The timeout is in the weight update."),
            Cause("hang-after-weight-update", "The engine may have died in the update."),
        ),
        fixes=(
            advice(
                "stop generation before the update",
                "The engine must be idle: no request in flight, worker loop left.",
            ),
            advice(
                "send weights over gloo or CUDA IPC",
                "No second NCCL group.",
                openrlhf="--vllm.sync_backend=gloo",
            ),
            safe("sync.timeout_s", "longer, for a very large model", "Only if it does proceed."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR110",
        name="wrong-network-interface",
        family=Family.DISTRIBUTED,
        texts=(
            "no socket interface found",
            "Bootstrap : no socket interface",
            "NCCL WARN*Connect to * failed",
            "NCCL WARN*No route to host",
            "Gloo connectFullMesh failed",
            "gloo/transport/tcp/pair.cc*connect",
            "Unable to find address for:",
            "makeDeviceForHostname(): unsupported gloo device",
            "gloo && No route to host",
            "socketStartConnect: Connect to*failed",
            "socketPollConnect*timed out",
        ),
        what="A node was looked for under an address or interface that leads nowhere.",
        why="NCCL and gloo pick the first interface they find: in containers and on hosts with "
        "several networks that is often the wrong one. A host name that resolves to 127.0.1.1 does "
        "the same to gloo.",
        fixes=(
            INTERFACE,
            advice("check the host's name in /etc/hosts", "It must not resolve to 127.0.1.1."),
            advice("open all ports between the nodes", "NCCL and gloo pick theirs at random."),
        ),
        explains=("ERR116", *AFTERMATH),
    ),
    Trouble(
        code="ERR111",
        name="infiniband-failure",
        family=Family.DISTRIBUTED,
        texts=(
            "NET/IB : Got completion",
            "NET/IB: Got completion",
            "ibv_reg_mr failed",
            "ibv_reg_mr_iova2 failed",
            "ibv_create_qp failed",
            "ibv_modify_qp failed",
            "ibv_create_cq failed",
            "NET/IB : Unable to open device",
            "transport retry counter exceeded",
            "ibv_poll_cq",
        ),
        what="An InfiniBand or RoCE operation failed inside NCCL.",
        why="A port that is down, a wrong GID index, no locked memory for the container, or a "
        "faulty link. Switching InfiniBand off works but costs most of the bandwidth.",
        fixes=(
            advice("ibstat, ibv_devinfo", "All ports must be Active and LinkUp."),
            advice("NCCL_IB_HCA, NCCL_IB_GID_INDEX", "Names the right port; RoCE mostly wants 3."),
            advice("--ulimit memlock=-1 for the container", "Registering memory locks it."),
            advice("NCCL_IB_DISABLE=1, to prove it", "If that runs, the fabric is at fault."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR112",
        name="p2p-unsupported",
        family=Family.DISTRIBUTED,
        texts=(
            "peer access is not supported between these two devices",
            "cudaErrorPeerAccessUnsupported",
            "doesn't support faster communication broadband via P2P or IB",
            "P2P access is not supported",
        ),
        what="These GPUs cannot reach each other's memory directly.",
        why="Consumer cards, virtual machines with IOMMU and some boards have no peer access; "
        "NCCL, custom all-reduce and CUDA IPC assume it.",
        fixes=(
            advice("NCCL_P2P_DISABLE=1 (and NCCL_IB_DISABLE=1 on consumer cards)", "Goes by host."),
            advice(
                "switch the engine's custom all-reduce off",
                "It needs peer access.",
                vllm="--disable-custom-all-reduce",
                sglang="--disable-custom-all-reduce",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR113",
        name="gpu-hardware-fault",
        family=Family.DISTRIBUTED,
        texts=(
            *(f"NVRM: Xid (*): {number}," for number in _FATAL_XIDS),
            "uncorrectable ECC error",
            "GPU has fallen off the bus",
            "uncorrectable NVLink error",
            "cudaErrorECCUncorrectable",
            "Unable to determine the device handle for GPU",
            "HSA_STATUS_ERROR_HARDWARE",
        ),
        what="A GPU reported a fault of its own.",
        why="Memory errors, a lost link or a hung card. Nothing in the run's settings causes this; "
        "the other errors follow from it.",
        fixes=(
            advice(
                "nvidia-smi -q -d ECC,PAGE_RETIREMENT; dmesg | grep -i xid", "Which card it is."
            ),
            advice("drain the node, reset or replace the card", "The run resumes elsewhere."),
        ),
        explains=("ERR001", "ERR106", "ERR250", "ERR251", *AFTERMATH),
    ),
    Trouble(
        code="ERR114",
        name="nccl-version-mismatch",
        family=Family.DISTRIBUTED,
        texts=(
            "NCCL version mismatch",
            "NCCL WARN*Message truncated",
            "Message truncated : received",
            "NCCL WARN*Mismatched",
            "nccl version * is not compatible",
        ),
        what="The two sides of a NCCL connection speak different versions.",
        why="Trainer and engine, or two nodes, run different NCCL builds (a system one beside the "
        "wheel's), or a stray process joined with an old id.",
        fixes=(
            advice(
                "the same image on all nodes; unset LD_LIBRARY_PATH and LD_PRELOAD",
                "So that all load the NCCL of their torch wheel.",
            ),
            advice("VLLM_NCCL_SO_PATH, NCCL_DEBUG=VERSION", "Which library is loaded where."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR115",
        name="port-in-use",
        family=Family.DISTRIBUTED,
        texts=(
            "EADDRINUSE",
            "Address already in use",
            "failed to listen on any local network address",
            "Only one usage of each socket address",
            "port is already allocated",
            "error*port * is already in use",
        ),
        what="A port that the run wants is taken.",
        why="Another or a leftover job listens there, or several servers on one node were given "
        "the same port.",
        fixes=(
            advice(
                "another port, or 0 for a free one",
                "Two runs on one node must not share the default 29500: torchrun --rdzv-endpoint "
                "localhost:0, accelerate launch --main_process_port 0.",
                deepspeed="--master_port",
                trl="vllm_group_port",
                sglang="--port, --dist-init-addr",
            ),
            advice("ss -ltnp; end the stale process by its id", "Shows who listens."),
        ),
        explains=("ERR116", "ERR117", *AFTERMATH),
    ),
    Trouble(
        code="ERR116",
        name="rendezvous-unreachable",
        family=Family.DISTRIBUTED,
        confidence=Confidence.INFERRED,
        texts=(
            "The client socket has timed out after",
            "The client socket has failed to connect to",
            "Timed out after * waiting for clients",
            "RendezvousTimeoutError",
            "RendezvousConnectionError",
            "The connection to the C10d store has failed",
            "connect() timed out",
            "wait timeout after *ms, keys",
            "Rendezvous timed out",
            "torch.distributed.DistStoreError: Timed out",
        ),
        what="Not all processes found each other at the start.",
        why="The address or port of rank 0 is wrong or closed, fewer nodes were started than "
        "nnodes says, or rank 0 ended before the others arrived.",
        causes=(
            Cause("rendezvous-unreachable", "The store of rank 0 did not answer in time."),
            Cause("peer-rank-died", "Rank 0 may have failed first."),
        ),
        fixes=(
            advice("nc -zv $MASTER_ADDR $MASTER_PORT, from every node", "Is the port reachable?"),
            advice(
                "the same MASTER_ADDR, MASTER_PORT and nnodes on all nodes, node_rank 0..n-1",
                "A missing or doubled node rank makes all wait.",
            ),
            INTERFACE,
            safe("cluster.start_timeout_s", "longer", "If nodes start far apart."),
        ),
        explains=("ERR104", "ERR132", "ERR139", "ERR140", "ERR141"),
    ),
    Trouble(
        code="ERR117",
        name="inference-server-unresponsive",
        family=Family.DISTRIBUTED,
        texts=(
            "Max retries exceeded with url: /get_model_info",
            "Max retries exceeded with url: /health",
            "Max retries exceeded with url: /get_server_info",
            "Max retries exceeded with url: /init_communicator",
            "Max retries exceeded with url: /get_world_size",
            "Max retries exceeded with url: /generate",
            "Max retries exceeded with url: /update_weights",
            "server can't be reached at",
            "sglang && Max retries exceeded with url",
        ),
        what="The inference server did not answer.",
        why="It is still loading, ended at its start, or listens elsewhere. Several SGLang servers "
        "on one node that are given overlapping ports is a known way to this.",
        causes=(
            Cause("inference-server-unresponsive", "The connection was refused."),
            Cause("port-in-use", "Servers of one node with overlapping ports shut each other out."),
        ),
        fixes=(
            advice("read the server's own log", "It says whether it started, and on which port."),
            advice(
                "fewer servers per node",
                "With one server over all cards of a node no two ports can clash.",
                slime="--rollout-num-gpus-per-engine",
                miles="--rollout-num-gpus-per-engine",
            ),
            safe(
                "engine.start_timeout_s",
                "longer",
                "A large model takes minutes to load.",
                trl="vllm_server_timeout",
            ),
            advice(
                "unset http_proxy, or set no_proxy to the nodes", "Proxies swallow local calls."
            ),
        ),
        explains=("ERR132", "ERR140"),
    ),
    Trouble(
        code="ERR118",
        name="launcher-variables-missing",
        family=Family.DISTRIBUTED,
        texts=(
            "environment variable RANK expected, but not set",
            "environment variable WORLD_SIZE expected, but not set",
            "environment variable MASTER_ADDR expected, but not set",
            "environment variable MASTER_PORT expected, but not set",
            "Error initializing torch.distributed using env:// rendezvous",
        ),
        what="The process was started without its launcher: it does not know its rank.",
        why="torch.distributed reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which "
        "torchrun, accelerate or deepspeed set.",
        fixes=(
            advice(
                "start it with torchrun --nproc_per_node N",
                "Or `accelerate launch`, `deepspeed`; for one process export the four variables.",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR119",
        name="more-ranks-than-gpus",
        family=Family.DISTRIBUTED,
        texts=("invalid device ordinal", "cudaErrorInvalidDevice"),
        what="A rank wants a GPU that does not exist or is not visible to it.",
        why="More processes per node than cards, or CUDA_VISIBLE_DEVICES hides some while the code "
        "still counts from 0 to 7.",
        fixes=(
            advice(
                "as many processes per node as visible cards",
                "`nvidia-smi -L` and CUDA_VISIBLE_DEVICES must agree with torchrun's "
                "--nproc_per_node or accelerate's --num_processes.",
            ),
        ),
        explains=("ERR106", *AFTERMATH),
    ),
    Trouble(
        code="ERR120",
        name="no-gpu-visible",
        family=Family.DISTRIBUTED,
        texts=(
            "No CUDA GPUs are available",
            "No HIP GPUs are available",
            "Ray does not allocate any GPUs on the driver node",
            "Current node has no GPU available",
        ),
        what="A process sees no GPU.",
        why="A Ray actor gets only the cards it asked for (none, where num_gpus is 0), and Ray "
        "hides the others; or CUDA_VISIBLE_DEVICES is empty.",
        causes=(
            Cause("no-gpu-visible", "CUDA finds no device in this process."),
            Cause("placement-group-unschedulable", "Or the cards are on another node."),
        ),
        fixes=(
            advice("num_gpus of the actor, or its placement group", "Ray shows just those cards."),
            advice("echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L in the worker", "What it sees."),
            advice("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1", "If you place cards yourself."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR121",
        name="partitioned-embedding-not-gathered",
        family=Family.DISTRIBUTED,
        texts=(
            "'weight' must be 2-D",
            "weight must be 2-D",
            "should be the same as weight shape (torch.Size([0])",
            "size mismatch, got input * vec (0)",
        ),
        what="A layer was used while its weights were still a flat or empty shard.",
        why="FSDP and ZeRO-3 gather a module's weights in its own forward hook. Called around it "
        "(an unwrapped model, a submodule's forward, a wrap policy that misses the module) the "
        "shard itself is seen.",
        fixes=(
            advice(
                "call forward through the wrapped model",
                "Do not unwrap it for the forward pass; generate through it as well.",
            ),
            advice(
                "name the right layer class, or use FSDP2",
                "FSDP2 keeps the shape of every parameter; multimodal models own their embedding "
                "in another class than the text model does.",
                transformers="fsdp_config.transformer_layer_cls_to_wrap, fsdp_config.version=2",
                axolotl="fsdp_version=2",
                trl="fsdp_config.version=2",
            ),
            advice(
                "deepspeed.zero.GatheredParameters around direct uses",
                "The same for ZeRO-3.",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR122",
        name="zero3-checkpoint-recompute",
        family=Family.DISTRIBUTED,
        texts=("Recomputed values for the following tensors have different metadata",),
        context=("torch.Size([0])", "recomputed metadata: {'shape': torch.Size([0", *_ZERO3),
        what="At recomputation a parameter had size 0: ZeRO-3 had already let it go.",
        why="Non-reentrant activation checkpointing compares saved tensors with recomputed ones. "
        "Frozen parameters that ZeRO-3 partitions are whole in one and empty in the other.",
        causes=(
            Cause("zero3-checkpoint-recompute", "The recomputed shape is empty."),
            Cause("checkpoint-recompute-mismatch", "The comparison that found it."),
        ),
        fixes=(
            advice(
                "reentrant checkpointing, with input gradients enabled for LoRA",
                "It does not compare; ZeRO-3 gathers again on its own.",
                transformers='gradient_checkpointing_kwargs={"use_reentrant": true}',
                trl='gradient_checkpointing_kwargs={"use_reentrant": true}',
                axolotl='gradient_checkpointing_kwargs={"use_reentrant": true}',
                openrlhf="--actor.gradient_checkpointing_reentrant",
            ),
            advice(
                "ZeRO-2, if it fits",
                "Parameters stay whole.",
                deepspeed="zero_optimization.stage=2",
            ),
        ),
        explains=("ERR123", *AFTERMATH),
    ),
    Trouble(
        code="ERR123",
        name="checkpoint-recompute-mismatch",
        family=Family.DISTRIBUTED,
        texts=(
            "Recomputed values for the following tensors have different metadata",
            "A different number of tensors was saved during the original forward and recomputation",
            "torch.utils.checkpoint.CheckpointError",
            "trying to save more tensors during recomputation than during the original forward",
        ),
        what="A checkpointed layer did other work when it was recomputed than the first time.",
        why="Something differs between the two passes: autocast, a cache that is filled in one, "
        "sharded parameters, a compiled kernel such as flex attention, MoE routing that flips.",
        causes=(
            Cause("checkpoint-recompute-mismatch", "torch compared the two passes."),
            Cause("zero3-checkpoint-recompute", "The usual reason where DeepSpeed ZeRO-3 is used."),
        ),
        fixes=(
            advice(
                "use_reentrant: true, with ZeRO-3 or flex attention",
                "Reentrant checkpointing does not compare.",
                transformers='gradient_checkpointing_kwargs={"use_reentrant": true}',
                trl='gradient_checkpointing_kwargs={"use_reentrant": true}',
                axolotl='gradient_checkpointing_kwargs={"use_reentrant": true}',
            ),
            advice("use_cache=False in training", "A cache makes the passes differ."),
            advice(
                "replay the routing of MoE layers in the recomputation",
                "Tokens that flip experts change the tensors' shapes.",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR124",
        name="deepspeed-single-process",
        family=Family.DISTRIBUTED,
        texts=("'DummyOptim' object has no attribute", "No module named 'mpi4py'"),
        what="A DeepSpeed configuration was used without its launcher.",
        why="Started as a plain process, DeepSpeed either is not initialised at all (its optimizer "
        "stays a placeholder) or looks for ranks through MPI.",
        fixes=(
            advice(
                "launch with deepspeed, torchrun or accelerate",
                "Also for one GPU: `--num_gpus 1`.",
            ),
            advice(
                "or leave DeepSpeed out on one GPU",
                "It has nothing to shard over there.",
                axolotl="deepspeed",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR125",
        name="fsdp-mixed-parameters",
        family=Family.DISTRIBUTED,
        texts=(
            "Must flatten tensors with uniform dtype",
            "Must flatten tensors with uniform `requires_grad`",
            "Must flatten tensors with the same `requires_grad`",
            "FSDP expects uniform original parameter dtype",
            "Inconsistent compute device and",
        ),
        what="FSDP cannot flatten parameters of different kinds into one.",
        why="FSDP1 joins all parameters of a unit: they must share a dtype and be all trained or "
        "all frozen. fp32 adapters on a bf16 base, or LoRA without use_orig_params, break that.",
        fixes=(
            advice(
                "FSDP2, or use_orig_params: true",
                "FSDP2 shards parameter by parameter.",
                transformers="fsdp_config.version=2",
                axolotl="fsdp_version=2",
                trl="fsdp_config.version=2",
            ),
            advice(
                "cast adapters to the base's dtype",
                "For QLoRA set bnb_4bit_quant_storage to the same dtype.",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR126",
        name="fsdp-wrap-class-unknown",
        family=Family.DISTRIBUTED,
        texts=(
            "Could not find the transformer layer class",
            "Could not find the transformer layer to wrap in the model",
            "transformer_layer_cls_to_wrap && not found",
        ),
        what="FSDP was told to wrap a layer class that the model does not have.",
        why="The class name differs between model families and between text and multimodal "
        "versions.",
        fixes=(
            advice(
                "the decoder layer's class of this model, or auto wrapping by the model itself",
                "`print(model)` shows it, for example Qwen3DecoderLayer.",
                transformers="fsdp_config.transformer_layer_cls_to_wrap",
                axolotl="fsdp_config.transformer_layer_cls_to_wrap",
                trl="fsdp_config.transformer_layer_cls_to_wrap",
                verl="actor_rollout_ref.actor.fsdp_config.wrap_policy",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR127",
        name="ddp-unused-parameters",
        family=Family.DISTRIBUTED,
        texts=(
            "Expected to have finished reduction in the prior iteration",
            "Expected to mark a variable ready only once",
            "making sure all `forward` function outputs participate in calculating loss",
        ),
        what="DDP waited for gradients that never came, or got one twice.",
        why="Parameters that take no part in the loss (a value head, unused experts, a vision "
        "tower) or a module that checkpointing with reentry runs twice.",
        fixes=(
            advice(
                "find_unused_parameters=True, or freeze what is not used",
                "DDP then knows which gradients to expect.",
                transformers="ddp_find_unused_parameters",
                trl="ddp_find_unused_parameters",
                axolotl="ddp_find_unused_parameters",
            ),
            advice(
                "use_reentrant: false with DDP and gradient checkpointing",
                "For 'ready only once': the reentrant form fires hooks twice.",
                transformers='gradient_checkpointing_kwargs={"use_reentrant": false}',
                axolotl='gradient_checkpointing_kwargs={"use_reentrant": false}',
                trl='gradient_checkpointing_kwargs={"use_reentrant": false}',
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR128",
        name="parallel-sizes-inconsistent",
        family=Family.DISTRIBUTED,
        texts=(
            "must be divisible by tensor parallel size",
            "must be divisible by tensor_parallel_size",
            "must be divisible by tensor_model_parallel_size",
            "not divisible by tensor_model_parallel_size",
            "not divisible by total_model_size",
            "should be divisible by tp_size",
            "heads * must be divisible by",
            "must be divisible by the number of key-value heads",
            "World size (*) is not divisible by",
            "world_size * is not divisible by",
            "world size * must be divisible by",
            "must be divisible by sequence_parallel_size",
            "must be divisible by ulysses",
            "must be divisible by sp_size",
            "must be divisible by the context parallel size",
            "world size (*) must be equal to",
            "sp_size*must divide",
        ),
        what="The parallel sizes do not fit the model or the number of GPUs.",
        why="Attention heads, KV heads and the vocabulary are split evenly over tensor parallel "
        "ranks, and tensor x pipeline x context x data parallel must make the world size.",
        fixes=(
            safe(
                "engine.tensor_parallel_size",
                "a divisor of the number of heads and of the GPUs of a node",
                "For 28 heads: 1, 2, 4 or 7.",
            ),
            advice(
                "check the product of all parallel sizes against the world size",
                "What is left over is data parallelism; it must be whole.",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR129",
        name="placement-group-unschedulable",
        family=Family.DISTRIBUTED,
        texts=(
            "Waiting for creating a placement group",
            "Waiting for placement group to be ready",
            "waiting for*placement group",
        ),
        when=counts.waited_long,
        notes=True,
        what="Ray cannot place what was asked for, and waits.",
        why="No node, or not all nodes together, has the bundle's resources free: too few GPUs "
        "have joined, another job holds them, or one bundle is larger than any node.",
        fixes=(
            advice("ray status", "Compare demands with usage, node by node."),
            advice(
                "ask for what is there",
                "Colocated: trainer GPUs; apart: trainer plus rollout GPUs. One bundle cannot span "
                "nodes.",
                slime="--colocate, --actor-num-gpus-per-node, --rollout-num-gpus",
                miles="--colocate, --actor-num-gpus-per-node, --rollout-num-gpus",
                verl="trainer.n_gpus_per_node, trainer.nnodes",
                openrlhf="--train.colocate_all, --actor.num_gpus_per_node",
            ),
            advice("start ray on all nodes first", "`ray start --address=<head>` on each."),
        ),
        explains=("ERR130", "ERR131", "ERR132", "ERR117"),
    ),
    Trouble(
        code="ERR130",
        name="placement-group-unschedulable",
        family=Family.DISTRIBUTED,
        texts=(
            "pending placement groups",
            "No available node types can fulfill",
            "Cannot provide a placement group",
            "Placement group creation timed out",
            "is less than total desired GPUs",
            "cannot be scheduled right now",
            "The number of required GPUs exceeds the total number of available GPUs",
            "number of required * exceeds the total number of available",
            "Insufficient resources for placement group",
            "placement group * is infeasible",
            "cannot be fulfilled by the cluster",
        ),
        what="The Ray cluster does not have the resources that were asked for.",
        why="Too few GPUs or CPUs have joined, another job holds them, or one bundle is larger "
        "than any single node. Waiting does not help.",
        fixes=(
            advice("ray status", "Compare demands with usage, node by node."),
            advice(
                "ask for what is there; bundles no larger than a node",
                "Two bundles of one GPU can lie on two nodes, one of two cannot.",
                verl="trainer.n_gpus_per_node, trainer.nnodes",
                slime="--colocate, --actor-num-gpus-per-node, --rollout-num-gpus",
                miles="--colocate, --actor-num-gpus-per-node, --rollout-num-gpus",
                openrlhf="--train.colocate_all, --actor.num_gpus_per_node",
            ),
            advice("join all nodes before the launch", "`ray start --address=<head>` on each."),
        ),
        explains=("ERR131", "ERR132", "ERR117"),
    ),
    Trouble(
        code="ERR131",
        name="vllm-host-ip-mismatch",
        family=Family.DISTRIBUTED,
        texts=(
            "Every node should have a unique IP address",
            "set VLLM_HOST_IP environment variable on each node",
        ),
        what="vLLM and Ray know the nodes by different addresses.",
        why="Each node must have one address of its own, the one that Ray uses. Copying the same "
        "VLLM_HOST_IP to all nodes, or a second network, breaks that.",
        fixes=(
            advice(
                "VLLM_HOST_IP: on each node its own address as `ray status` shows it", "As said."
            ),
            INTERFACE,
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR132",
        name="worker-died-unknown",
        family=Family.DISTRIBUTED,
        confidence=Confidence.HEURISTIC,
        texts=(
            "Worker unexpectedly exits with a connection error code 2",
            "The actor died unexpectedly before finishing this task",
            "A worker died or was killed while executing a task by an unexpected system error",
            "Worker exit type: SYSTEM_ERROR",
            "The worker died unexpectedly while executing this task",
            "ray.exceptions.WorkerCrashedError",
            "ActorUnavailableError",
        ),
        what="A Ray worker vanished without a Python error.",
        why="Ray sees only the lost connection. Most often the kernel killed it for host memory; a "
        "crash in native code (NCCL, an engine kernel) is the other usual reason.",
        causes=(
            Cause("host-ram-oom", "The usual reason of a death without a traceback."),
            Cause("worker-died-unknown", "A native crash looks the same to Ray."),
        ),
        fixes=(
            advice("dmesg -T | grep -i -E 'killed process|segfault'", "Which of the two it was."),
            advice("the dead worker's own .err file in Ray's session folder", "Its last words."),
            advice(
                "offload less to the CPU, fewer workers per node",
                "If it was memory.",
                openrlhf="--ds.adam_offload=false",
                verl="actor_rollout_ref.actor.fsdp_config.optimizer_offload",
            ),
        ),
        explains=("ERR140",),
    ),
    Trouble(
        code="ERR133",
        name="ray-cgraph-timeout",
        family=Family.DISTRIBUTED,
        texts=(
            "RayChannelTimeoutError",
            "increase RAY_CGRAPH_get_timeout",
            "increase RAY_CGRAPH_submit_timeout",
        ),
        what="A step of the engine's Ray graph took longer than its limit.",
        why="With tensor or pipeline parallelism over Ray, vLLM runs a compiled graph whose reads "
        "give up after 10 s by default (300 s in newer ones). A first step that compiles, a slow "
        "network or a dead worker exceeds it.",
        fixes=(
            advice("RAY_CGRAPH_get_timeout=300", "Must be in the environment of the engine."),
            safe(
                "engine.enforce_eager",
                "true",
                "No graph capture and compilation within a step.",
                chatlearn="models.policy.enforce_eager",
            ),
            advice(
                "the mp executor, where the engine fits on one node",
                "It needs no Ray graph.",
                vllm="--distributed-executor-backend=mp",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR134",
        name="ray-cluster-unreachable",
        family=Family.DISTRIBUTED,
        texts=(
            "Failed to connect to GCS",
            "Timed out while waiting for GCS to become available",
            "Unable to connect to GCS at",
            "GCS server at * is unreachable",
            "Could not find any running Ray instance",
            "The current node timed out during startup",
            "Some Ray subprocesses exited unexpectedly",
            "Failed to get the system config from raylet",
            "Check failed: * Failed to connect to raylet",
            "ray.exceptions.RaySystemError",
        ),
        what="Ray's head process cannot be reached.",
        why="It was not started, ended (often for memory or a full disk), or its port 6379 is "
        "closed to this node. A leftover session of another user or version does it too.",
        fixes=(
            advice(
                "ray stop on all nodes, then ray start --head and the workers", "A fresh start."
            ),
            advice("df -h /tmp", "Ray's session folder needs room."),
            advice("gcs_server.out and raylet.out in the session's logs folder", "Why it ended."),
        ),
        explains=("ERR132",),
    ),
    Trouble(
        code="ERR135",
        name="ray-version-mismatch",
        family=Family.DISTRIBUTED,
        texts=("Version mismatch: The cluster was started with",),
        what="This process and the Ray cluster run different Ray or Python versions.",
        why="Ray needs the same versions everywhere; objects and actors are pickled between them.",
        fixes=(advice("the same environment on all nodes and in the driver", "Then restart Ray."),),
        explains=("ERR134", *AFTERMATH),
    ),
    Trouble(
        code="ERR136",
        name="ray-node-lost",
        family=Family.DISTRIBUTED,
        texts=(
            "has been marked dead because the detector has missed too many heartbeats",
            "node health check failed",
            "The node with node id: * has been marked dead",
            "Actor's node was terminated",
            "The actor died because its node has died",
            "raylet has exited unexpectedly",
        ),
        what="A node of the Ray cluster was lost.",
        why="The machine was taken away or is so loaded (memory, disk) that it no longer answers.",
        causes=(
            Cause("ray-node-lost", "Ray marked it dead."),
            Cause("host-ram-oom", "A node that swaps does not answer either."),
        ),
        fixes=(
            advice(
                "is the machine up? its dmesg and raylet.out", "Pre-empted, crashed or starved."
            ),
            advice("resume from the last checkpoint once it is back", "Nothing else is lost."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR137",
        name="ray-runtime-env-failed",
        family=Family.DISTRIBUTED,
        texts=(
            "RuntimeEnvSetupError",
            "Failed to set up runtime environment",
            "Failed to download runtime_env",
            "exceeds the maximum size of * MiB",
            "Runtime env agent timed out",
        ),
        what="Ray could not build the workers' environment.",
        why="A package that does not install, a working directory that is too large to upload "
        "(checkpoints or data inside it), or no network on the workers.",
        fixes=(
            advice('runtime_env: {"excludes": [...]} or a smaller working_dir', "Leave data out."),
            advice("install packages into the image", "Then no worker has to."),
            advice("runtime_env_setup-*.log in the session's logs folder", "The reason."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR138",
        name="vllm-mode-mismatch",
        family=Family.DISTRIBUTED,
        texts=(
            "in init_communicator",
            "/init_communicator",
            "vllm_server_host",
            "vllm_server_base_url",
        ),
        when=lambda view: (
            _mixes_modes(view)
            and view.log.has("error", "Traceback (most recent call last)", "Watchdog caught")
        ),
        notes=True,
        what="The trainer is set to run vLLM in its own processes, and at the same time points "
        "at a vLLM server.",
        why="Colocate mode starts engines inside the trainer; a server's host and port belong to "
        "server mode. With both, the communicator that joins them cannot be made.",
        fixes=(
            advice(
                "one of the two: server mode with its host, or colocate without",
                "The modes exclude each other.",
                trl="vllm_mode",
                ms_swift="--vllm_mode",
                axolotl="trl.vllm_mode",
            ),
            INTERFACE,
        ),
        explains=("ERR117", *AFTERMATH),
    ),
    Trouble(
        code="ERR155",
        name="vllm-mode-mismatch",
        family=Family.DISTRIBUTED,
        texts=(
            "server can't be reached at",
            "server is not up yet",
            "Max retries exceeded with url: /health",
            "Max retries exceeded with url: /init_communicator",
            "Max retries exceeded with url: /get_world_size",
        ),
        context=("Error:", "Traceback (most recent call last)"),
        when=_serves_colocated,
        what="The trainer looks for a vLLM server that does not answer, while its settings are "
        "those of engines inside the trainer.",
        why="In server mode somebody must start the server, and its memory and parallelism are "
        "set there. Such settings in the trainer's config are read in colocate mode only.",
        fixes=(
            advice(
                "colocate mode; or start the server, and give it those settings",
                "The modes exclude each other.",
                trl="vllm_mode=colocate",
                ms_swift="--vllm_mode=colocate",
                axolotl="trl.vllm_mode",
            ),
            INTERFACE,
        ),
        explains=("ERR117", *AFTERMATH),
    ),
    Trouble(
        code="ERR139",
        name="job-ended-from-outside",
        family=Family.DISTRIBUTED,
        confidence=Confidence.INFERRED,
        texts=(
            "Received 15 death signal",
            "Received Signals.SIGTERM death signal",
            "SignalException: Process * got signal: 15",
            "Signal 15 (SIGTERM) received by PID",
            "Received 1 death signal",
        ),
        what="The run was told to stop from outside (SIGTERM or a closed terminal).",
        why="A scheduler, a person, or a shell that was closed without nohup ended it; the run "
        "itself did not fail.",
        fixes=(
            advice("tmux, nohup or a batch job", "So that a lost connection does not end the run."),
            advice("ask the scheduler (sacct, kubectl describe)", "It knows who stopped it."),
        ),
        explains=("ERR140",),
    ),
    Trouble(
        code="ERR140",
        name="rank-failed",
        family=Family.DISTRIBUTED,
        confidence=Confidence.HEURISTIC,
        level=Level.WARN,
        texts=(
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError",
            "ChildFailedError:",
            "torch.multiprocessing.spawn.ProcessExitedException",
            "subprocess.CalledProcessError: Command*returned non-zero exit status",
        ),
        what="A process of the run ended with an error; the launcher says which rank, not why.",
        why="This is the launcher's summary. The reason is in that rank's own output, above it.",
        causes=(
            Cause("rank-failed", "The launcher's own words."),
            Cause("worker-died-unknown", "Nothing in this log says why."),
        ),
        fixes=(
            READ_FIRST_ERROR,
            advice("torchrun --redirects 3 --log-dir logs", "Each rank then has its own file."),
        ),
    ),
    Trouble(
        code="ERR141",
        name="native-crash",
        family=Family.DISTRIBUTED,
        confidence=Confidence.INFERRED,
        texts=(
            "exitcode: -11",
            "exitcode : -11",
            "exitcode  : -11",
            "return code = -11",
            "exit code 139",
            "Signal 11 (SIGSEGV) received",
            "Segmentation fault (core dumped)",
            "Fatal Python error: Segmentation fault",
            "Fatal Python error: Aborted",
            "SIGSEGV received at time",
            "exitcode: -6",
            "exitcode  : -6",
            "Signal 6 (SIGABRT) received",
        ),
        what="A process crashed in native code, without a Python error.",
        why="Libraries built against each other's other versions, a kernel that does not fit the "
        "GPU, or an abort (signal 6) by a watchdog after a failure elsewhere.",
        fixes=(
            advice("PYTHONFAULTHANDLER=1", "Prints the Python line at which it happened."),
            advice(
                "reinstall compiled extensions against this torch",
                "flash-attn, apex, transformer-engine, vLLM: one build for one torch.",
            ),
        ),
        explains=("ERR132", "ERR140", "ERR254", "ERR255"),
    ),
    Trouble(
        code="ERR142",
        name="zero3-parameter-not-available",
        family=Family.DISTRIBUTED,
        texts=(
            "param.ds_status == ZeroParamStatus.AVAILABLE",
            "'status': 'NOT_AVAILABLE'",
            "still have inflight params",
            "ZeroParamStatus.INFLIGHT",
            "backward pass is invalid for module in evaluation mode",
            "object has no attribute 'ds_id'",
        ),
        what="ZeRO-3 met a parameter in a state that it did not expect.",
        why="ZeRO-3 records the order in which modules run and fetches ahead. Another order in a "
        "later step (MoE routing, a generation call, a second model) or a use around the hooks "
        "breaks the record.",
        fixes=(
            advice(
                "mark MoE blocks as leaf modules",
                "All their experts are then fetched together.",
            ),
            advice("gather parameters for generation", "`unwrap_model_for_generation` does."),
            SHARD,
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR143",
        name="zero-gradient-twice",
        family=Family.DISTRIBUTED,
        texts=(
            "has already been reduced. Gradient computed twice",
            "Gradient computed twice for this partition",
        ),
        what="DeepSpeed saw a gradient of the same parameter twice in one backward pass.",
        why="Reentrant checkpointing under ZeRO-1/2, two backward calls, or a module used twice.",
        fixes=(
            advice(
                "use_reentrant: false under ZeRO-1 and ZeRO-2",
                "Each hook then fires once.",
                transformers='gradient_checkpointing_kwargs={"use_reentrant": false}',
                trl='gradient_checkpointing_kwargs={"use_reentrant": false}',
                axolotl='gradient_checkpointing_kwargs={"use_reentrant": false}',
            ),
            advice("one backward call per micro-batch", "Add the losses first."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR144",
        name="mixed-dtensor-and-tensor",
        family=Family.DISTRIBUTED,
        texts=(
            "got mixed torch.Tensor and DTensor",
            "need to convert all torch.Tensor to DTensor",
            "No backend type associated with device type cpu",
            "Tensors must be CUDA and dense",
        ),
        what="An operation or collective met tensors that do not go together: sharded with plain, "
        "or CPU with a GPU-only backend.",
        why="Under FSDP2 or tensor parallelism parameters are DTensors: what meets them must be "
        "one too, or they must be made whole first. A CPU tensor cannot travel over NCCL.",
        fixes=(
            advice("x.full_tensor() or distribute_tensor", "Bring both to the same kind."),
            advice('init_process_group("cpu:gloo,cuda:nccl")', "Gives CPU tensors a way."),
            advice(
                "keep lm_head, adapters and buffers inside the sharded model", "Then hooks act."
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR145",
        name="job-time-limit",
        family=Family.DISTRIBUTED,
        texts=("DUE TO TIME LIMIT", "longer than specified deadline", "reason: DeadlineExceeded"),
        what="The scheduler ended the job at its time limit.",
        why="The run itself did not fail.",
        fixes=(
            advice("a longer limit, or resume in a new job", "Nothing since the last checkpoint."),
            safe("checkpoint.interval_steps", "shorter than the limit", "So that little is lost."),
        ),
        explains=("ERR014", *AFTERMATH),
    ),
    Trouble(
        code="ERR146",
        name="job-ended-from-outside",
        family=Family.DISTRIBUTED,
        texts=(
            "DUE TO PREEMPTION",
            "DUE TO NODE FAILURE",
            "srun: error: Node failure",
            "slurmstepd: error: *CANCELLED AT",
            "Preemption is imminent",
        ),
        unless=("DUE TO TIME LIMIT",),
        what="The scheduler took the node away or cancelled the job.",
        why="Pre-emption, a failed node or scancel: the run itself did not fail.",
        fixes=(
            advice(
                "resubmit and resume from the last checkpoint", "Nothing is wrong with the run."
            ),
            safe("checkpoint.interval_steps", "lower", "Less is lost the next time."),
        ),
        explains=("ERR014", *AFTERMATH),
    ),
    Trouble(
        code="ERR147",
        name="process-group-state",
        family=Family.DISTRIBUTED,
        texts=(
            "Default process group has not been initialized",
            "trying to initialize the default process group twice",
            "AcceleratorState has already been initialized",
            "tensor model parallel group is already initialized",
            "tensor model parallel group is not initialized",
            "model parallel group is not initialized",
        ),
        what="A process group was used before it was made, or made twice.",
        why="Trainer and engine in one process both want to own torch.distributed, or a second "
        "trainer or engine is built without ending the first.",
        fixes=(
            advice(
                "let one of them own it",
                "External launcher mode for a vLLM inside the trainer; else its own process.",
                vllm="distributed_executor_backend=external_launcher",
            ),
            advice("one trainer per process", "Restart the notebook's kernel between runs."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR148",
        name="async-prefetch-deadlock",
        family=Family.DISTRIBUTED,
        confidence=Confidence.INFERRED,
        texts=TIMEOUTS,
        context=("async_prefetch: true", "async_prefetch=true", "async_prefetch': true"),
        within=0,
        when=lambda view: view.log.has("fsdp"),
        what="A collective timed out in a run with FSDP and asynchronous prefetch of rollouts.",
        why="The thread that scores or generates ahead issues FSDP gathers at other moments on "
        "each rank than the training thread does: the ranks deadlock.",
        causes=(
            Cause("async-prefetch-deadlock", "Both are on."),
            Cause("collective-mismatch-uneven-batches", "That is how it stops."),
        ),
        fixes=(
            advice(
                "async_prefetch: false with FSDP",
                "Gathers then come from one thread.",
                axolotl="trl.async_prefetch=false",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR149",
        name="zero3-moe-expert-hang",
        family=Family.DISTRIBUTED,
        confidence=Confidence.INFERRED,
        texts=TIMEOUTS,
        context=_ZERO3,
        within=0,
        when=lambda view: view.log.has(*_MOE) and not view.log.has("set_z3_leaf_modules"),
        what="A collective timed out in a run of a mixture-of-experts model under ZeRO-3.",
        why="Ranks whose tokens reach other experts fetch other parameters: the gathers differ "
        "from rank to rank.",
        causes=(
            Cause("zero3-moe-expert-hang", "MoE and ZeRO-3 without leaf modules."),
            Cause("collective-mismatch-uneven-batches", "Ranks issue different gathers."),
        ),
        fixes=(
            advice(
                "mark the MoE block as a ZeRO-3 leaf module",
                "All experts are then fetched on all ranks.",
            ),
            advice("FSDP2, or expert parallelism", "Neither fetches by routing."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR150",
        name="too-many-open-files",
        family=Family.DISTRIBUTED,
        texts=(
            "[Errno 24] Too many open files",
            "OSError: Too many open files",
            "received 0 items of ancdata",
            "Too many open files (os error 24)",
        ),
        what="The process has more files and sockets open than it may.",
        why="Tensors passed between processes, connections to tools and sandboxes, and data shards "
        "each hold a descriptor; the default limit is 1024.",
        fixes=(
            advice("ulimit -n 65536", "In the shell, container or unit that starts the run."),
            advice(
                'torch.multiprocessing.set_sharing_strategy("file_system")',
                "Data workers then need no descriptor per tensor.",
            ),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR151",
        name="too-many-threads",
        family=Family.DISTRIBUTED,
        texts=(
            "can't start new thread",
            "pthread_create failed",
            "libgomp: Thread creation failed",
            "failed to create new OS thread",
            "fork: retry: Resource temporarily unavailable",
            "BlockingIOError: [Errno 11] Resource temporarily unavailable",
        ),
        what="The system refuses to start more threads or processes.",
        why="The user's process limit or the container's pids limit is reached: every worker "
        "starts as many BLAS threads as the machine has cores.",
        fixes=(
            advice("ulimit -u, and --pids-limit of the container", "Raise them."),
            safe("trainer.threads", "1 to 8", "Fewer threads per process."),
            advice("OMP_NUM_THREADS=1, RAYON_NUM_THREADS=4", "The same for all libraries."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR152",
        name="rocm-visible-devices",
        family=Family.DISTRIBUTED,
        texts=(
            "Please use HIP_VISIBLE_DEVICES instead of ROCR_VISIBLE_DEVICES",
            "ROCR_VISIBLE_DEVICES && HIP_VISIBLE_DEVICES && inconsistent",
            "Inconsistent values found in CUDA_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES",
            "Inconsistant values found in HIP_VISIBLE_DEVICES",
        ),
        what="Two variables name different visible AMD GPUs.",
        why="Ray sets one, the scheduler another; ROCm applies them one after the other, and the "
        "workers see none or the wrong ones.",
        fixes=(
            advice("unset ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES alone."),
            advice("RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES=1", "Ray then leaves it alone."),
        ),
        explains=("ERR119", "ERR120", *AFTERMATH),
    ),
    Trouble(
        code="ERR153",
        name="cuda-in-forked-process",
        family=Family.DISTRIBUTED,
        texts=(
            "Cannot re-initialize CUDA in forked subprocess",
            "start a new process before the current process has finished its bootstrapping",
        ),
        what="A process was started in a way that CUDA does not allow.",
        why="CUDA does not survive fork. A script whose main part is not behind "
        '`if __name__ == "__main__":` breaks the other way, spawn.',
        fixes=(
            advice("VLLM_WORKER_MULTIPROC_METHOD=spawn", "For vLLM's workers."),
            advice('if __name__ == "__main__":', "Around everything that starts the run."),
            advice("no CUDA call before workers start", "Not even torch.cuda.device_count()."),
        ),
        explains=AFTERMATH,
    ),
    Trouble(
        code="ERR154",
        name="rendezvous-unreachable",
        family=Family.DISTRIBUTED,
        level=Level.WARN,
        confidence=Confidence.INFERRED,
        texts=counts.JOINING,
        when=counts.stops_at_start,
        what="The log ends where the processes look for each other: not all of them have come.",
        why="Each rank waits without a word until all the others have joined. The address or port "
        "of rank 0 cannot be reached, WORLD_SIZE is larger than the ranks that were started, or "
        "two have the same RANK.",
        causes=(
            Cause("rendezvous-unreachable", "Nothing was said after the ranks began to wait."),
            Cause("launcher-variables-missing", "RANK and WORLD_SIZE may not be what was started."),
        ),
        fixes=(
            advice("nc -zv $MASTER_ADDR $MASTER_PORT", "On every node: can rank 0 be reached?"),
            advice("torchrun --nnodes --nproc_per_node", "Counts that match what is started."),
            INTERFACE,
            DEBUG,
        ),
    ),
    Trouble(
        code="ERR156",
        name="collective-mismatch-uneven-batches",
        family=Family.DISTRIBUTED,
        confidence=Confidence.INFERRED,
        texts=(*TIMEOUTS, *_HCCL_WAITS),
        context=_RAN_OUT,
        within=200,
        what="A rank had no batch left while the others waited for it in a collective.",
        why="Ranks that draw different numbers of batches part ways at the end of an epoch: the "
        "first to end leaves, and the rest wait until their timeout.",
        fixes=(
            advice(
                "give every rank the same number of batches",
                "Drop the last incomplete one, or pad; count rows per rank after filtering.",
                transformers="dataloader_drop_last",
                trl="dataloader_drop_last",
                llama_factory="dataloader_drop_last",
            ),
            advice("log the number of batches of every rank", "Before the loop: they must agree."),
        ),
        explains=("ERR157", *AFTERMATH),
    ),
    Trouble(
        code="ERR157",
        name="nccl-timeout",
        family=Family.DISTRIBUTED,
        confidence=Confidence.INFERRED,
        texts=(*_HCCL_WAITS, *_HCCL_CONNECTS),
        what="A collective of HCCL (Ascend) timed out: not all ranks came to it.",
        why="A rank that failed, is slow, or has fewer batches never meets the rest; the message "
        "lists all of these whichever it is. Where a socket timed out, the ranks never connected.",
        causes=(
            Cause("nccl-timeout", "The wait for another rank ended."),
            Cause("collective-mismatch-uneven-batches", "Usual reason of a stop in mid-run."),
        ),
        fixes=(
            READ_FIRST_ERROR,
            advice(
                "give every rank the same number of batches",
                "Drop the last incomplete one.",
                transformers="dataloader_drop_last",
                trl="dataloader_drop_last",
                llama_factory="dataloader_drop_last",
            ),
            advice("HCCL_EXEC_TIMEOUT, HCCL_CONNECT_TIMEOUT", "Longer, if a rank is only slow."),
            advice("HCCL_IF_IP, HCCL_SOCKET_IFNAME", "Where ranks never connected."),
        ),
        explains=AFTERMATH,
    ),
)
