"""Where a guide is wrong, contradicts itself or another one, and what is advised in its place.

A row: guide, what it says (in our words), what is advised, codes of the rules that advise it.
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
    (AXOLOTL, "Raise the sync interval when the importance ratio nears 0; further down it says to lower it.", "Lower it: a longer interval makes samples older. Then correct for what is left.", "OFF005 CFG014"),
    (AXOLOTL, "A smallest importance ratio near 0 alone means stale data.", "The minimum over all tokens of a batch is near 0 in healthy runs: one unlikely token is enough. Judge mean, effective sample size and distance of log-probs.", "OFF005 OFF004"),
    (AXOLOTL, "Entropy belongs between 0.05 and 0.5, above 1 the run does not converge.", "The level depends on task, model and temperature. What counts is where it goes: a fall to a fifth of its start, or a doubling.", "POL001 POL002"),
    (AXOLOTL, "A reward should pass 0.15 within 20 steps.", "Depends on scale and difficulty. Exactly 0 for all answers is an illness; low and flat is information.", "RWD002 RWD015"),
    (AXOLOTL, "In GRPO the gradient norm belongs between 0.001 and 1.", "Its scale depends on how the loss is summed, and even on the library's version. Growth against its own start counts.", "LRN010 LRN017"),
    (AXOLOTL, "A chat model's training loss is typically 0.5 to 2.", "Depends on the data and on which tokens have a loss. Its start against guessing, and its course, can be judged.", "LRN013 LRN004"),
    (AXOLOTL, "More than 0.3 of the tokens clipped means that clipping is too aggressive.", "It means that updates carry too far from the policy that sampled: fewer updates per rollout or a lower rate come before a wider range. With sequence-level ratios it is normal.", "POL007 POL008"),
    (AXOLOTL, "Raise the limit of tokens when most completions reach it.", "Only if answers would end: where no end token is ever written, a higher limit costs more and cures nothing.", "GEN001 GEN002"),
    (AXOLOTL, "Diversity in EBFT above 1 is mode collapse, 0.01 to 0.1 is healthy; alignment is healthy from 0.3 to 0.9.", "Both logged values are doubled, so that they reach 2, and features that are not whitened are all alike from the start. Judge growth of the one and course of the other.", "POL017 LRN021"),
    (AXOLOTL, "Very large effective batches amplify gradient noise.", "They average it out. What grows with accumulation is the loss itself, where it is added up without being divided.", "LRN012"),
    (AXOLOTL, "Replace NaN in logits by 0 as a safety net.", "It turns a broken forward pass into a wrong gradient that nobody sees. Skip the step, and find the module.", "NUM002 NUM001"),
    (AXOLOTL, "A NaN loss after a step with a finite gradient norm is a problem of the forward pass.", "Or of the update before: weights that are not finite give the same picture. Score a held-out row with the saved weights.", "NUM001 NUM002"),
    (AXOLOTL, "Convert bf16 weights to fp16 on the way to the engine.", "fp16 cannot hold what is above 65504 and loses small values. Send the bytes, in the format that they have.", "ERR600 SYN004"),
    (AXOLOTL, "Exit code -7 comes from DeepSpeed's version.", "It is signal 7, a bus error: shared memory is full, most often in a container.", "ERR017"),
    (AXOLOTL, "Against overfitting, hold more rows out.", "That shows it sooner and leaves less to train on. Fewer passes, the best checkpoint, more data.", "LRN001 DAT010"),
    (AXOLOTL, "Weight decay up to 0.1 against overfitting; elsewhere, above 0.1 it suppresses learning in adapters.", "For adapters 0.01 or none; with all weights it helps little.", "CFG007 LRN001"),
    (AXOLOTL, "Dropout of an adapter at 0.05, without saying for which kind of run.", "Not in RL: the policy that trains is then another than the one that sampled.", "CFG019 POL010"),
    (AXOLOTL, "Pad with the end-of-text token.", "Where that token also ends a completion and padding is masked by its id, the end is masked with it, and completions never end. A pad token of its own, or packing.", "DAT007 ERR451"),
    (AXOLOTL, "Non-reentrant checkpointing is recommended, and reentrant is required in two cases.", "With ZeRO-3 or flex attention reentrant, elsewhere non-reentrant: the settings decide.", "CFG010 ERR123"),
    (MILES, "An importance threshold (TIS) of 0.9.", "Where nothing is to be corrected the weight is 1: a bound below that cuts nearly every token. 2 is usual.", "CFG021 OFF006"),
    (MILES, "Larger groups for INT4 accuracy (256 in place of 128).", "More weights share a scale, which is less exact. Smaller groups, of a size that divides the width.", "CFG016 QNT002"),
    (MILES, "INT4 in training saves memory if the flag is set and the groups fit.", "It rounds in place while master weights, gradients and moments stay: the engine's copy gets smaller, training does not.", "ERR003 ERR004"),
    (MILES, "INT4 needs a higher learning rate, FP8 a lower one.", "Rounding errors are no reason for larger steps. Close the gap first, then choose the rate by what the run shows.", "QNT002 LRN005"),
    (MILES, "Larger buckets when CUDA IPC fails.", "The size of a bucket does not decide whether memory can be shared: allocator settings, containers and topology do.", "ERR205 ERR206"),
    (MILES, "Routing replay against every mismatch of training and inference.", "It concerns models with experts only. Elsewhere: precision, kernels, old weights.", "OFF001 MOE001 MOE005"),
    (MILES, "A lookahead of 5 is best for most models; elsewhere, reduce it to 3.", "It depends on the share that is accepted: the tokens that one verification gives decide.", "SPC001 SPC004"),
    (MILES, "Balance experts by a loss of weight 0.01, in RL too; ChatLearn says to switch it off in RL.", "In RL off, or as small as can be: it moves the policy. In SFT 0.001 to 0.01.", "MOE004 MOE002"),
    (MILES, "A capacity factor against imbalance.", "It drops tokens, and the engine does not drop the same ones: trainer and engine then disagree.", "MOE003 MOE001"),
    (LIGHTRFT, "Raise the training batch when the number of rollouts per episode is 0.", "It is 0 because the training batch is larger than what one rollout gives: lower it, or sample more.", "ERR407 ERR430"),
    (LIGHTRFT, "KL too large means that the policy does not update: lower the coefficient.", "A large KL means that it has gone far. A large coefficient is what holds it: KL is then near 0.", "POL016 POL004"),
    (LIGHTRFT, "Lower the engine's share of memory when there is none for the KV cache.", "Where the share is used up by the weights, it must rise. Only where others hold the device must it fall; the words of the error tell.", "ERR024 ERR027"),
    (LIGHTRFT, "Lower the engine's share of memory when vLLM does not start.", "The first error above the summary says why: memory is one of many reasons.", "ERR255 ERR030"),
    (LIGHTRFT, "Raise NCCL_TIMEOUT, or set NCCL_BACKEND=gloo.", "NCCL reads no such variables, and the timeout is PyTorch's. A longer one only waits longer for a rank that will not come: find that rank.", "ERR100 ERR101"),
    (LIGHTRFT, "Empty the cache regularly against a memory leak.", "It gives back what is unused; a leak is in use. Compare two memory snapshots.", "MEM001 MEM004"),
    (LIGHTRFT, "Spread the engine over more devices to sample faster.", "Small models lose time in communication. More requests at a time, and replicas, come first.", "PRF001 ERR748"),
    (LIGHTRFT, "vLLM uses FP8 by itself on an H100.", "It uses it where it is told to, or where the checkpoint is quantised; the price is a gap to the trainer.", "QNT002 QNT001"),
    (LIGHTRFT, "Halve the samples per prompt to sample faster; axolotl asks for 16 or more.", "Fewer samples make groups without a difference likelier. Fewer prompts cost less.", "RWD001 RWD010"),
    (LIGHTRFT, "Log only every 100 steps, to be faster.", "A run that breaks between two records cannot be told from a healthy one. Find what takes the time.", "PRF006 PRF008"),
    (LIGHTRFT, "A rate of 1e-6 is the high end and 1e-7 the cure for spikes, whatever is trained.", "Adapters take ten to a hundred times the rate of all weights.", "CFG005 LRN005"),
    (CHATLEARN, "Eager execution when Ray's graph times out.", "It helps where compilation takes the time; where a worker has died it hides nothing and cures nothing. Read the worker's log first.", "ERR133 ERR132"),
    (CHATLEARN, "Switch load balancing and the router's bias off in RL; miles says to balance.", "Off at first, with the loads logged: should experts starve over a long run, a small loss comes back.", "MOE004 MOE002"),
    (SLIME, "Switch the check for NaN off, to skip the step.", "It then is not skipped: the NaN is applied and stays. Skip with the check on.", "CFG017 ERR658 NUM001"),
    (SLIME, "An illegal memory access may be lack of memory: lower the engine's share.", "It is one cause among several, kernels and token ids beyond the vocabulary being others. Run once with CUDA_LAUNCH_BLOCKING=1.", "ERR250 ERR251"),
)
