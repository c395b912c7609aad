"""Statements of guides that are wrong or contradict each other, and the advice to follow instead.

A row: guide, its statement (in our words), our advice, codes of the rules that give this advice.
"""
# ruff: noqa: E501 (a table)
# fmt: off

from __future__ import annotations

MILES = "miles: troubleshooting"
AXOLOTL = "axolotl: training stability"
LIGHTRFT = "LightRFT: troubleshooting"
CHATLEARN = "ChatLearn: FAQ"
SLIME = "slime: Q&A"
ROWS: tuple[tuple[str, str, str, str], ...] = (
    (AXOLOTL, "Raise the sync interval when the importance ratio nears 0; further down it says to lower it.", "Lower the interval, because a longer one makes samples older. Then correct for the staleness that remains.", "OFF005 CFG014"),
    (AXOLOTL, "A smallest importance ratio near 0 alone means stale data.", "The minimum over all tokens of a batch is near 0 in healthy runs: one unlikely token is enough. Judge the mean, the effective sample size and the log-prob differences instead.", "OFF005 OFF004"),
    (AXOLOTL, "Entropy should be between 0.05 and 0.5; above 1 the run does not converge.", "The level depends on task, model and temperature. Judge the change: entropy that falls to a fifth of its initial value, or doubles.", "POL001 POL002"),
    (AXOLOTL, "A reward should pass 0.15 within 20 steps.", "This depends on the scale of the reward and on the difficulty. A reward of exactly 0 for all answers is an illness; a low, flat reward is only information.", "RWD002 RWD015"),
    (AXOLOTL, "In GRPO the gradient norm should be between 0.001 and 1.", "Its scale depends on how the loss is summed, and even on the library's version. Compare it with its own initial value.", "LRN010 LRN017"),
    (AXOLOTL, "A chat model's training loss is typically 0.5 to 2.", "This depends on the data and on which tokens have a loss. Compare the initial loss with that of random guessing, and judge whether the loss falls.", "LRN013 LRN004"),
    (AXOLOTL, "More than 0.3 of the tokens clipped means that clipping is too aggressive.", "It means that the updates move the policy too far from the one that sampled. First use fewer updates per rollout or a lower learning rate, and only then a wider range. With sequence-level ratios, such a share is normal.", "POL007 POL008"),
    (AXOLOTL, "Raise the token limit when most completions reach it.", "Raise it only if answers end at some point. If the model never writes an end token, a higher limit costs more and solves nothing.", "GEN001 GEN002"),
    (AXOLOTL, "Diversity in EBFT above 1 is mode collapse, 0.01 to 0.1 is healthy; alignment is healthy from 0.3 to 0.9.", "Both logged values are doubled, so they reach 2, and features that are not whitened are all similar from the start. Judge whether diversity grows and whether alignment falls.", "POL017 LRN021"),
    (AXOLOTL, "Very large effective batches amplify gradient noise.", "Large batches average noise out. With accumulation the loss itself grows if it is summed over micro-batches and not divided.", "LRN012"),
    (AXOLOTL, "Replace NaN in logits by 0 as a safety net.", "This turns a broken forward pass into a wrong gradient that nobody notices. Skip the step, and find the module that produces NaN.", "NUM002 NUM001"),
    (AXOLOTL, "A NaN loss after a step with a finite gradient norm is a problem of the forward pass.", "It can also be a problem of the update before, because weights that are not finite have the same effect. To decide, score a held-out row with the saved weights.", "NUM001 NUM002"),
    (AXOLOTL, "Convert bf16 weights to fp16 before sending them to the engine.", "fp16 cannot represent values above 65504 and loses small ones. Send the weights in the format that they have.", "ERR600 SYN004"),
    (AXOLOTL, "Exit code -7 is caused by the DeepSpeed version.", "It means signal 7, a bus error: shared memory is full, most often in a container.", "ERR017"),
    (AXOLOTL, "Against overfitting, hold more rows out.", "That shows overfitting sooner, but leaves less data to train on. Use fewer passes, the best checkpoint, or more data.", "LRN001 DAT010"),
    (AXOLOTL, "Weight decay up to 0.1 against overfitting; elsewhere, above 0.1 it suppresses learning in adapters.", "For adapters use 0.01 or no weight decay; if all weights are trained, it helps little.", "CFG007 LRN001"),
    (AXOLOTL, "Dropout of an adapter at 0.05, without saying for which kind of run.", "Do not use dropout in RL: it makes the trained policy differ from the one that sampled.", "CFG019 POL010"),
    (AXOLOTL, "Pad with the end-of-text token.", "If that token also ends a completion and padding is masked by its id, the end is masked, too, and completions never end. Use a separate pad token, or packing.", "DAT007 ERR451"),
    (AXOLOTL, "Non-reentrant checkpointing is recommended, and reentrant is required in two cases.", "Use reentrant checkpointing with ZeRO-3 or flex attention, and non-reentrant otherwise.", "CFG010 ERR123"),
    (MILES, "An importance threshold (TIS) of 0.9.", "A token that needs no correction has the weight 1, so a threshold below 1 truncates nearly every token. 2 is usual.", "CFG021 OFF006"),
    (MILES, "Use larger groups for INT4 accuracy (256 instead of 128).", "In larger groups more weights share a scale, which is less exact. Use smaller groups, of a size that divides the layers' width.", "CFG016 QNT002"),
    (MILES, "INT4 in training saves memory if the flag is set and the groups fit.", "INT4 rounds the weights in place, but master weights, gradients and moments remain. The engine's copy gets smaller; training does not.", "ERR003 ERR004"),
    (MILES, "INT4 needs a higher learning rate, FP8 a lower one.", "Rounding errors are no reason for larger steps. Reduce the gap between engine and trainer first, then choose the learning rate by the run's metrics.", "QNT002 LRN005"),
    (MILES, "Use larger buckets when CUDA IPC fails.", "Whether memory can be shared depends on allocator settings, containers and topology, not on the size of a bucket.", "ERR205 ERR206"),
    (MILES, "Use routing replay against every mismatch between training and inference.", "Routing replay only affects models with experts. For other models look at precision, kernels and stale weights.", "OFF001 MOE001 MOE005"),
    (MILES, "A lookahead of 5 is best for most models; elsewhere, reduce it to 3.", "The best lookahead depends on the share of accepted tokens. Choose it by the number of tokens that one verification yields.", "SPC001 SPC004"),
    (MILES, "Use a load-balancing loss of weight 0.01, also in RL; ChatLearn says to switch it off in RL.", "In RL switch it off, or keep it as small as possible, because it changes the policy. In SFT use 0.001 to 0.01.", "MOE004 MOE002"),
    (MILES, "Use a capacity factor against imbalance.", "A capacity factor drops tokens, and the engine does not drop the same ones, so trainer and engine disagree.", "MOE003 MOE001"),
    (LIGHTRFT, "Raise the training batch when the number of rollouts per episode is 0.", "The number is 0 because the training batch is larger than one rollout. Lower the training batch, or sample more.", "ERR407 ERR430"),
    (LIGHTRFT, "KL too large means that the policy does not update: lower the coefficient.", "A large KL means that the policy has moved far. A coefficient that is too large keeps the policy from moving, and then KL is near 0.", "POL016 POL004"),
    (LIGHTRFT, "Lower the engine's share of memory when there is no memory for the KV cache.", "If the weights use up the share, raise it. Lower it only if other processes use the device's memory. The error message tells which case it is.", "ERR024 ERR027"),
    (LIGHTRFT, "Lower the engine's share of memory when vLLM does not start.", "Memory is one of many reasons. Read the first error above the summary, which gives the reason.", "ERR255 ERR030"),
    (LIGHTRFT, "Raise NCCL_TIMEOUT, or set NCCL_BACKEND=gloo.", "NCCL reads no such variables; the timeout belongs to PyTorch. A longer timeout only waits longer for a rank that will not respond. Find that rank.", "ERR100 ERR101"),
    (LIGHTRFT, "Empty the cache regularly against a memory leak.", "This frees only unused memory, but leaked memory is in use. Compare two memory snapshots.", "MEM001 MEM004"),
    (LIGHTRFT, "Spread the engine over more devices to sample faster.", "Small models lose time in communication. First use more concurrent requests, and replicas.", "PRF001 ERR748"),
    (LIGHTRFT, "vLLM uses FP8 automatically on an H100.", "vLLM uses FP8 only if it is configured, or if the checkpoint is quantised. It costs a gap to the trainer.", "QNT002 QNT001"),
    (LIGHTRFT, "Halve the samples per prompt to sample faster; axolotl asks for 16 or more.", "With fewer samples, groups whose rewards are all equal become more likely. Reducing the number of prompts costs less.", "RWD001 RWD010"),
    (LIGHTRFT, "Log only every 100 steps, to be faster.", "If a run breaks between two records, it looks healthy. Find the part that takes the time instead.", "PRF006 PRF008"),
    (LIGHTRFT, "A learning rate of 1e-6 is high, and 1e-7 cures spikes, whatever is trained.", "Adapters need ten to a hundred times the learning rate of full fine-tuning.", "CFG005 LRN005"),
    (CHATLEARN, "Use eager execution when Ray's graph times out.", "Eager execution helps if compilation takes the time. It does not help if a worker has died. Read the worker's log first.", "ERR133 ERR132"),
    (CHATLEARN, "Switch load balancing and the router's bias off in RL; miles says to balance the load.", "Start with both off and log the load of the experts. If experts get no tokens over a long run, add a small loss.", "MOE004 MOE002"),
    (SLIME, "Switch off the NaN check in order to skip the step.", "Without the check, the step is not skipped: NaN gets into the weights and stays there. Leave the check on and skip the step.", "CFG017 ERR658 NUM001"),
    (SLIME, "An illegal memory access may be caused by lack of memory: lower the engine's share.", "Lack of memory is one cause; others are kernels and token ids beyond the vocabulary. Run once with CUDA_LAUNCH_BLOCKING=1 to find out.", "ERR250 ERR251"),
)
