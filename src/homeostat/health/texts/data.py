"""Error texts of the family data: rows, tokenizers, templates, labels, packing."""

from __future__ import annotations

import re

from homeostat.health.finding import Cause, Confidence, Family, Level
from homeostat.health.texts.conditions import first_failures
from homeostat.health.texts.parts import advice, change, safe
from homeostat.health.texts.trouble import Trouble
from homeostat.health.view import RunView

# What trainers and rewards usually call their columns.
_COLUMNS = (
    "prompt",
    "messages",
    "text",
    "completion",
    "chosen",
    "rejected",
    "conversations",
    "instruction",
    "input",
    "output",
    "question",
    "answer",
    "problem",
    "solution",
    "ground_truth",
    "reward_model",
    "data_source",
    "input_ids",
    "labels",
    "content",
    "role",
    "images",
    "query",
    "response",
    "extra_info",
)
_PAD_AND_EOS = re.compile(r"pad_token_id\W{1,5}(\d{1,9})\D.{0,60}?eos_token_id\W{1,5}(\d{1,9})")


def _pad_is_eos(view: RunView) -> bool:
    """The tokenizer's pad token is its end-of-sequence token, by the settings or a printed line."""
    pad, eos = view.raw_settings.get("pad_token_id"), view.raw_settings.get("eos_token_id")
    if pad is not None and eos is not None:
        return pad == eos
    found = [_PAD_AND_EOS.search(line.text) for line in view.log.find("pad_token_id")]
    return any(match is not None and match[1] == match[2] for match in found)


_TOKENS = (
    Trouble(
        code="ERR450",
        name="pad-token-missing",
        family=Family.DATA,
        texts=(
            "Asking to pad but the tokenizer does not have a padding token",
            "Cannot handle batch sizes > 1 if no padding token is defined",
            "does not have a pad token",
            "Padding_value argument must be a number",
            "pad_token_id * is None",
            "tokenizer must have a pad token",
            "Please select a token to use as `pad_token`",
        ),
        what="Rows must be padded, and the tokenizer has no pad token.",
        why=(
            "Many base models come without one. Where the end-of-sequence token is empty as "
            "well (bad conversions), copying it does not help."
        ),
        fixes=(
            safe(
                "model.pad_token",
                "an unused special token (<|endoftext|>, <pad>)",
                (
                    "A token of its own for padding, already in the vocabulary, needs no new "
                    "embedding."
                ),
                trl="pad_token",
                axolotl="special_tokens.pad_token",
            ),
            advice(
                "",
                (
                    "Set tokenizer.pad_token and model.config.pad_token_id alike. Avoid the "
                    "end-of-sequence token where the collator masks padding: the end would "
                    "never be learned."
                ),
            ),
        ),
    ),
    Trouble(
        code="ERR451",
        name="pad-equals-eos",
        family=Family.DATA,
        texts=("DataCollatorForCompletionOnlyLM", "DataCollatorForLanguageModeling"),
        when=_pad_is_eos,
        what=(
            "The pad token is the end-of-sequence token, and this collator masks every pad "
            "token: the end of an answer is never trained."
        ),
        why=(
            "The collator sets the label of each pad token to -100. With pad = EOS the real "
            "EOS is masked, too, and the model learns to go on for ever."
        ),
        fixes=(
            change(
                "model.pad_token",
                "a token other than EOS",
                "Padding then no longer hides the end of the answer.",
                trl="pad_token",
                axolotl="special_tokens.pad_token",
            ),
            advice(
                "",
                (
                    "Check a row's labels: the last trained token must be EOS or the "
                    "end-of-turn token."
                ),
            ),
        ),
        level=Level.WARN,
        confidence=Confidence.INFERRED,
    ),
    Trouble(
        code="ERR466",
        name="token-id-out-of-range",
        family=Family.DATA,
        texts=(
            "indexSelectLargeIndex",
            "indexSelectSmallIndex",
            "vectorized_gather_kernel",
            "srcIndex < srcSelectDimSize",
            "index out of range in self",
            "Assertion `ind >= 0 && ind < ind_dim_size",
            "Assertion `t >= 0 && t < n_classes` failed",
            "nll_loss_forward* Assertion",
            "embedding* index out of range",
            "`-sizes[i] <= index && index < sizes[i]",
            "Target * is out of bounds",
        ),
        what="A token id or label lies outside the vocabulary of the model.",
        why=(
            "Tokens were added to the tokenizer without resizing the embeddings, tokenizer "
            "and model belong to different families, a label is neither -100 nor a token, or "
            "positions exceed the model's table."
        ),
        fixes=(
            advice(
                "",
                (
                    "Compare len(tokenizer) with the model's vocab_size; resize the "
                    "embeddings after adding tokens, or use the tokenizer that belongs to "
                    "the model."
                ),
            ),
            advice(
                "",
                (
                    "Run once with CUDA_LAUNCH_BLOCKING=1 or on the CPU: the traceback then "
                    "names the operation."
                ),
            ),
        ),
        explains=("ERR467",),
    ),
    Trouble(
        code="ERR467",
        name="device-side-assert",
        family=Family.DATA,
        texts=("device-side assert triggered", "CUDA_ERROR_ASSERT", "cudaErrorAssert"),
        what=(
            "A check inside a GPU kernel failed; the line that reports it is not the one "
            "that caused it."
        ),
        why=(
            "Nearly always an index out of range: a token id beyond the vocabulary, a bad "
            "label, or probabilities that are NaN in sampling."
        ),
        causes=(
            Cause("device-side-assert", "the kernel's own message, if printed, stands above"),
            Cause("token-id-out-of-range", "the most common reason"),
        ),
        fixes=(
            advice(
                "",
                (
                    "Run again with CUDA_LAUNCH_BLOCKING=1 (or the same batch on the CPU): "
                    "then the traceback is right."
                ),
            ),
            advice(
                "",
                (
                    "Check that every token id is below the model's vocab_size and every "
                    "label is -100 or a token."
                ),
            ),
        ),
        confidence=Confidence.HEURISTIC,
    ),
    Trouble(
        code="ERR468",
        name="rows-over-length",
        family=Family.DATA,
        texts=(
            "Token indices sequence length is longer than the specified maximum sequence length",
        ),
        what=(
            "A text is longer than the tokenizer's nominal limit; harmless where rows are "
            "cut or dropped later."
        ),
        why="The tokenizer only knows the limit in its own config and says so once.",
        fixes=(
            change(
                "data.overlong",
                "drop, truncate or refuse",
                "Decide what becomes of rows beyond data.max_length.",
            ),
        ),
        level=Level.INFO,
    ),
    Trouble(
        code="ERR469",
        name="prompt-too-long",
        family=Family.DATA,
        texts=(
            "is larger than max_length=",
            "is longer than max_prompt_length",
            "Prompt length * is longer than",
            "sequence_length * is larger than max_length",
            "prompt is longer than the maximum",
            "exceeds max_prompt_length",
        ),
        what="A prompt is longer than the limit, and the settings say to refuse such rows.",
        why=(
            "The length limit counts tokens after the chat template; long few-shot or tool "
            "prompts go over it."
        ),
        fixes=(
            change(
                "data.overlong",
                "drop",
                "Leave such rows out; each is counted.",
                verl="data.filter_overlong_prompts",
                axolotl="excess_length_strategy",
            ),
            change(
                "data.max_length",
                "longer",
                "Or give them room.",
                verl="data.max_prompt_length",
                openrlhf="--data.max_len",
                lightrft="--prompt_max_len",
                slime="--rollout-max-prompt-len",
            ),
        ),
    ),
    Trouble(
        code="ERR472",
        name="special-tokens-added",
        family=Family.DATA,
        texts=(
            (
                "Special tokens have been added in the vocabulary, make sure the associated "
                "word embeddings are fine-tuned"
            ),
            "tokenizer has new PAD/BOS/EOS tokens that differ from the model config",
            "The new embeddings will be initialized from a multivariate normal",
            "You are resizing the embedding layer",
        ),
        what=(
            "Special tokens differ between tokenizer and model config, or were added; usual "
            "and harmless when intended."
        ),
        why=(
            "The libraries mention it each time. New tokens need trained embeddings: with "
            "LoRA the embeddings stay frozen unless they are saved with the adapter."
        ),
        fixes=(
            advice(
                "",
                (
                    "If you added tokens under LoRA, train embeddings and head as well "
                    "(modules_to_save or trainable token indices)."
                ),
                axolotl="lora_modules_to_save",
                trl="lora_modules_to_save",
                llama_factory="additional_target",
            ),
        ),
        level=Level.INFO,
    ),
    Trouble(
        code="ERR474",
        name="benign-tokenizers-fork",
        family=Family.DATA,
        texts=("The current process just got forked, after parallelism has already been used",),
        what="The tokenizers library switches its threads off after a fork: harmless.",
        why="Data-loader workers are forked after the tokenizer was used.",
        fixes=(advice("", "Set TOKENIZERS_PARALLELISM=false to silence it."),),
        level=Level.INFO,
    ),
    Trouble(
        code="ERR476",
        name="right-padded-generation",
        family=Family.DATA,
        texts=("A decoder-only architecture is being used, but right-padding was detected",),
        what="Prompts are padded on the right while a decoder-only model generates from them.",
        why=(
            "The model then continues after padding tokens; what it writes, and every reward "
            "of it, is wrong."
        ),
        fixes=(advice("", "Set tokenizer.padding_side to left for generation."),),
        level=Level.WARN,
    ),
)

_LABELS = (
    Trouble(
        code="ERR452",
        name="all-labels-masked",
        family=Family.DATA,
        texts=(
            "All labels in your dataset are -100",
            "all labels are -100",
            "All labels are -100",
            "Training losses will be all 0",
            "all labels are masked",
            "All tokens are masked",
            "No trainable tokens",
            "no trainable tokens",
            "labels are all -100",
            "has no assistant tokens",
            "no loss-bearing tokens",
        ),
        what="No token of the rows has a label: there is nothing to train on.",
        why=(
            "The markers or template parts that tell prompt from answer do not occur in the "
            "tokenised text, or the answers were cut off by the length limit."
        ),
        fixes=(
            advice(
                "",
                (
                    "Give the exact markers of this model's chat template (for Gemma "
                    "<start_of_turn>user and <start_of_turn>model, each with its newline, "
                    "for ChatML <|im_start|>assistant), and print one row's labels."
                ),
                trl="assistant_only_loss",
                axolotl="datasets[].roles_to_train",
            ),
            change(
                "data.max_length",
                "longer",
                "Where prompts alone fill the limit: give the answer room, or drop such rows.",
            ),
        ),
        explains=("ERR457", "ERR453"),
    ),
    Trouble(
        code="ERR457",
        name="all-labels-masked",
        family=Family.DATA,
        texts=("ZeroDivisionError",),
        context=(
            "num_items_in_batch",
            "num_valid_tokens",
            "labels",
            "loss_mask",
            "response_mask",
            "compute_loss",
        ),
        within=6,
        what="The loss is divided by the number of trained tokens, and that number is 0.",
        why=(
            "A batch, or every batch, holds no token with a label: masked by the template's "
            "markers, or cut off by the length limit."
        ),
        causes=(Cause("all-labels-masked", "a whole batch without a trained token"),),
        fixes=(
            advice(
                "",
                (
                    "Print the labels of one batch; drop rows without a trained token; check "
                    "markers and the length limit."
                ),
            ),
            change(
                "data.bad_rows",
                "drop",
                "Rows with nothing to train on are then left out and counted.",
            ),
        ),
        confidence=Confidence.INFERRED,
    ),
    Trouble(
        code="ERR453",
        name="response-marker-not-found",
        family=Family.DATA,
        texts=(
            "Could not find response key",
            "Could not find instruction key",
            "This instance will be ignored in loss calculation",
        ),
        what="The response marker was not found in a row, which therefore trains nothing.",
        why=(
            "The marker is tokenised differently inside the text (leading space or newline), "
            "does not belong to this template, or was cut off by the length limit."
        ),
        causes=(
            Cause("response-marker-not-found", "the collator names the marker that it looked for"),
            Cause("all-labels-masked", "rows without the marker have no label at all"),
        ),
        fixes=(
            advice(
                "",
                (
                    "Give the marker as token ids with its context, as it stands in the "
                    "tokenised text; compare with tokenizer.decode of one row."
                ),
            ),
            change(
                "data.max_length",
                "longer",
                "Where the answer is cut off: give it room, or drop such rows.",
            ),
        ),
        level=Level.WARN,
    ),
    Trouble(
        code="ERR456",
        name="all-labels-masked",
        family=Family.DATA,
        texts=(
            "chat template does not contain `{% generation %}` keyword",
            "does not contain `{% generation %}`",
            "chat template does not support `return_assistant_tokens_mask`",
            "doesn't support returning assistant tokens mask",
        ),
        what=(
            "The chat template does not mark the assistant's tokens, so a loss on assistant "
            "turns only finds none."
        ),
        why=(
            "The mask comes from {% generation %} blocks in the template; without them it is "
            "all zeros."
        ),
        fixes=(
            safe(
                "model.chat_template",
                "a template with {% generation %} blocks",
                "The assistant's tokens are then marked.",
                trl="chat_template_path",
                axolotl="chat_template_jinja",
            ),
            advice(
                "",
                "Or train on completions of prompt/completion rows, which needs no such mask.",
                trl="completion_only_loss",
            ),
        ),
        level=Level.WARN,
    ),
    Trouble(
        code="ERR479",
        name="labels-missing",
        family=Family.DATA,
        texts=(
            "The model did not return a loss from the inputs",
            "loss is None && labels",
            "did not return a loss",
        ),
        what="The model returned no loss: the batch has no labels that it understands.",
        why=(
            "The collator does not make labels, names them differently, or the model's "
            "forward has none."
        ),
        fixes=(
            advice(
                "",
                (
                    "Let the collator add labels under the name that the forward takes, or "
                    "give the trainer a loss function of its own."
                ),
                transformers="label_names",
                trl="label_names",
            ),
        ),
    ),
    Trouble(
        code="ERR478",
        name="labels-shape-mismatch",
        family=Family.DATA,
        texts=(
            "Expected input batch_size * to match target batch_size",
            "ValueError: * target batch_size",
            "Expected target size",
            "shape mismatch* labels",
        ),
        what="Logits and labels of a batch have different lengths.",
        why=(
            "Labels were padded, shifted or packed differently from the inputs, or the model "
            "adds tokens (images, prefix) that the labels lack."
        ),
        fixes=(
            advice(
                "",
                (
                    "Use a collator that pads labels with -100 to the inputs' length; check "
                    "custom packing and image placeholders."
                ),
            ),
        ),
    ),
)

_TEMPLATES = (
    Trouble(
        code="ERR454",
        name="chat-template-mismatch",
        family=Family.DATA,
        texts=("tokenization mismatch:",),
        what=(
            "The conversation's pieces do not add up to the tokenised whole, so rows are "
            "ignored or mis-masked."
        ),
        why=(
            "The code that masks user turns counts separator tokens for another tokenizer "
            "than the one in use (newer versions split or add a space differently)."
        ),
        fixes=(
            advice(
                "",
                (
                    "Use the conversation template and preprocessing made for this tokenizer "
                    "(separators, legacy flag), or mask by the model's own chat template."
                ),
            ),
            advice("", "Print one row's labels: every ignored row is lost for training."),
        ),
        level=Level.WARN,
    ),
    Trouble(
        code="ERR455",
        name="chat-template-rewrites-history",
        family=Family.DATA,
        texts=(
            "Token mismatch detected",
            "Full tokenization length",
            "template changes earlier turns",
            "template rewrites earlier turns",
        ),
        what="Tokenising turn by turn gives other tokens than tokenising the whole conversation.",
        why=(
            "The chat template treats earlier turns differently from the last one: it drops "
            "or adds think blocks, a default system message or a separator."
        ),
        causes=(
            Cause(
                "chat-template-rewrites-history", "the pieces are longer or shorter than the whole"
            ),
            Cause("chat-template-mismatch", "turns are trained that the model will never see so"),
        ),
        fixes=(
            change(
                "data.train",
                "turns: each",
                "One row for each trained turn, tokenised as the model sees it when it answers.",
            ),
            safe(
                "model.chat_template",
                "a template that leaves earlier turns alone",
                "Then pieces and whole agree.",
                trl="chat_template_path",
                axolotl="chat_template_jinja",
            ),
            advice("", "Or keep reasoning only in the last turn of the data."),
        ),
        level=Level.WARN,
    ),
    Trouble(
        code="ERR458",
        name="chat-template-mismatch",
        family=Family.DATA,
        texts=(
            "Mismatch between tokenized prompt and the start of tokenized prompt+completion",
            "Mismatch between tokenized prompt and the start of tokenized prompt+c",
        ),
        what=(
            "A prompt tokenised alone is not the beginning of prompt and completion "
            "tokenised together."
        ),
        why=(
            "The template or tokenizer joins the last prompt token with the completion, or "
            "adds something at the end of the prompt (a think block): the mask is off by "
            "some tokens."
        ),
        causes=(
            Cause("chat-template-mismatch", "prompt and whole are tokenised differently"),
            Cause("chat-template-rewrites-history", "templates with think blocks do that"),
        ),
        fixes=(
            advice(
                "",
                (
                    "End prompts without trailing space, use the template's generation "
                    "prompt, and compare the two token lists of one row."
                ),
            ),
        ),
        level=Level.WARN,
        confidence=Confidence.INFERRED,
    ),
    Trouble(
        code="ERR459",
        name="chat-template-missing",
        family=Family.DATA,
        texts=(
            "tokenizer.chat_template is not set",
            "default chat template is no longer allowed",
            "does not have a chat template",
            "No chat template is set for",
            "tokenizer's chat_template is null",
            "`chat_template` is null",
            "chat_template is not set and no template argument was passed",
            "Cannot apply chat template to tokenizer because tokenizer.chat_template is not set",
        ),
        what="Rows are conversations, and the tokenizer has no chat template.",
        why="Base models often come without one, and the libraries no longer guess.",
        fixes=(
            safe(
                "model.chat_template",
                "a Jinja file of the template",
                "Name the template that the model shall learn.",
                trl="chat_template_path",
                axolotl="chat_template",
                llama_factory="template",
                verl="actor_rollout_ref.model.custom_chat_template",
            ),
            advice("", "Or start from the instruct model, whose tokenizer has one."),
        ),
    ),
    Trouble(
        code="ERR460",
        name="chat-template-mismatch",
        family=Family.DATA,
        texts=(
            "Conversation roles must alternate",
            "conversation roles must alternate",
            "jinja2.exceptions.TemplateError",
            "jinja2.exceptions.UndefinedError",
            "jinja2.exceptions.TemplateSyntaxError",
            "System role not supported",
            "Only user and assistant roles are supported",
            "After the optional system message",
            'can only concatenate str (not "list") to str',
            "Unexpected message role",
        ),
        what="The chat template refuses a conversation of the data.",
        why=(
            "The template allows certain roles in a certain order only (user and assistant "
            "in turn, no system or tool message, text content), and a row differs."
        ),
        fixes=(
            advice(
                "",
                (
                    "Rewrite the rows (merge neighbouring turns of one role, put the system "
                    "text into the first user turn), or use a template that allows them."
                ),
            ),
            change("data.bad_rows", "drop", "Or leave such rows out; each is counted."),
        ),
    ),
    Trouble(
        code="ERR480",
        name="chat-template-mismatch",
        family=Family.DATA,
        texts=(
            "Content end boundary is before start boundary",
            "Could not find content start/end boundary",
            "Content not found in template",
            "Failed to find turn",
            "Could not find turn",
        ),
        what="An assistant turn's text was not found in what the chat template rendered.",
        why=(
            "The template strips or rewrites the content (white space, think blocks, empty "
            "turns), so that the trained span cannot be placed; the turn is skipped or "
            "mis-masked."
        ),
        fixes=(
            advice(
                "",
                (
                    "Look at the rows that it names: empty contents and leading blanks are "
                    "usual; strip them in the data, or give the template's field names."
                ),
                axolotl="datasets[].message_property_mappings",
            ),
            safe(
                "model.chat_template",
                "a template that keeps contents as they are",
                "Then each turn can be found again.",
                axolotl="chat_template_jinja",
            ),
        ),
        level=Level.WARN,
    ),
)

_ROWS = (
    Trouble(
        code="ERR461",
        name="column-missing",
        family=Family.DATA,
        texts=(
            *(f"KeyError: '{name}'" for name in _COLUMNS),
            "not in the dataset. Current columns in the dataset",
            "Column name * not in the dataset",
            "Column * doesn't exist",
            "Columns * not in the dataset",
            "does not contain the required column",
            "missing required column",
            "Invalid keys in the example",
            "dataset must have a * column",
            "must contain a `prompt`",
            "dataset should have a",
        ),
        what="A column that the trainer or reward reads is not in the rows.",
        why=(
            "The dataset names it differently, or a step before removed it (mapping, "
            "remove_unused_columns)."
        ),
        causes=(
            Cause("column-missing", "the error names a column"),
            Cause("dataset-column-missing", "a reward may be what asks for it"),
        ),
        fixes=(
            safe(
                "data.train",
                "the right column names",
                "Say which column holds what.",
                verl="data.prompt_key",
                openrlhf="--data.input_key",
                lightrft="--input_key",
                slime="--input-key",
                axolotl="datasets[].field_messages",
                trl="dataset_text_field",
            ),
            advice("", "Or rename the column in the data; print the dataset's features once."),
        ),
        confidence=Confidence.INFERRED,
    ),
    Trouble(
        code="ERR462",
        name="columns-removed",
        family=Family.DATA,
        texts=("No columns in the dataset match the model's forward method signature",),
        what="The trainer removed every column of the dataset before the collator saw it.",
        why=(
            "Columns that the model's forward does not take are dropped unless told "
            "otherwise; raw text columns are meant for the collator or a preprocessing step."
        ),
        fixes=(
            advice(
                "",
                "Set remove_unused_columns to false, or tokenise the rows before.",
                trl="remove_unused_columns",
                transformers="remove_unused_columns",
                axolotl="remove_unused_columns",
            ),
        ),
        explains=("ERR461", "ERR481"),
    ),
    Trouble(
        code="ERR481",
        name="columns-unused",
        family=Family.DATA,
        texts=(
            "don't have a corresponding argument in * and have been ignored",
            "have been ignored: ",
        ),
        what="Columns that the model does not take were ignored: usual.",
        why="Only a reward function or collator of yours that reads them would miss them.",
        fixes=(
            advice(
                "",
                (
                    "If one of them is needed (an answer for the reward): set "
                    "remove_unused_columns to false."
                ),
                trl="remove_unused_columns",
                transformers="remove_unused_columns",
            ),
        ),
        level=Level.INFO,
    ),
    Trouble(
        code="ERR463",
        name="dataset-empty",
        family=Family.DATA,
        texts=(
            "num_samples should be a positive integer value, but got num_samples=0",
            "Train dataloader is empty",
            "train dataset is empty",
            "Dataset is empty",
            "dataset is empty",
            "filter dataset len: 0",
            "There seems not to be a single sample in your epoch_iterator",
            "There seems to be not a single sample in your epoch_iterator",
            "Trainer: training requires a train_dataset",
            "empty dataset",
            "0 samples left after",
            "no rows left",
            "yielded 0 samples",
            "corresponds to no data",
        ),
        what="No rows are left to train on.",
        why=(
            "The split or file is empty, every row was dropped as too long or broken, or the "
            "dataset is smaller than one batch while the last incomplete batch is dropped."
        ),
        fixes=(
            change(
                "data.max_length",
                "longer",
                "If the length filter took all of them.",
                verl="data.max_prompt_length",
                axolotl="sequence_len",
            ),
            advice(
                "",
                (
                    "Check the path, split and filters; print the number of rows after each "
                    "step; a batch must not be larger than the dataset."
                ),
            ),
            advice(
                "",
                "A prepared dataset in a cache may be stale: delete it.",
                axolotl="dataset_prepared_path",
            ),
        ),
        explains=("ERR407",),
    ),
    Trouble(
        code="ERR464",
        name="data-file-unreadable",
        family=Family.DATA,
        texts=(
            "pyarrow.lib.ArrowInvalid",
            "ArrowInvalid",
            "DatasetGenerationError",
            "DatasetGenerationCastError",
            "An error occurred while generating the dataset",
            "JSON parse error",
            "Couldn't cast",
            "because column names don't match",
            "ArrowTypeError",
            "Parquet magic bytes not found",
            "Failed to read file",
            "JSONDecodeError",
            "All the data files must have the same columns",
            "UnicodeDecodeError: 'utf-8' codec can't decode",
        ),
        unless=(
            "torch_compile_cache",
            "torchinductor",
            "torch/_inductor",
            "codecache.py",
            ".triton/cache",
            "triton/runtime/cache",
            "vllm/compilation",
        ),
        what="A data file (or another JSON file) cannot be read as what it claims to be.",
        why=(
            "A broken or truncated line, a file that is not JSON/Parquet (an LFS pointer, an "
            "HTML page), or a column whose type changes from row to row."
        ),
        fixes=(
            advice(
                "",
                (
                    "Check the file and line that the message names: each line of a .jsonl "
                    "must be one object, with the same type per column (text everywhere or "
                    "numbers everywhere)."
                ),
            ),
            advice(
                "",
                (
                    "Delete the half-made cache of the datasets library (HF_DATASETS_CACHE) "
                    "and try again."
                ),
            ),
        ),
        confidence=Confidence.INFERRED,
    ),
    Trouble(
        code="ERR465",
        name="rows-unequal-length",
        family=Family.DATA,
        texts=(
            "Unable to create tensor, you should probably activate truncation and/or padding",
            "expected sequence of length",
            "stack expects each tensor to be equal size",
            "excessive nesting (inputs type",
            "default_collate: batch must contain tensors",
            "Perhaps your features (`* in this case) have excessive nesting",
            "each element in list of batch should be of equal size",
        ),
        what="Rows of different length could not be put into one batch.",
        why=(
            "A column (labels, images, extra features) is not padded by the collator, or a "
            "row has lists where numbers are expected."
        ),
        fixes=(
            advice(
                "",
                (
                    "Use a collator that pads every column (labels with -100), and drop "
                    "columns that are not tensors; with batch size 1 the error hides."
                ),
            ),
        ),
    ),
    Trouble(
        code="ERR470",
        name="packing-cross-contamination",
        family=Family.DATA,
        texts=(
            "cross-contamination between batches",
            "cross contamination",
            "cross-contamination between samples",
            "packing, but the attention implementation is not set to",
            "padding-free training is enabled, but the attention implementation",
            "does not handle cross sample decontamination",
            "Packing samples without * attention",
            "packing && attend to each other",
            "packed && attend to each other",
            "packed && attend across",
        ),
        what=(
            "Several rows are packed into one sequence, and the attention in use lets them "
            "see each other."
        ),
        why=(
            "Only variable-length kernels (FlashAttention with position ids) or a block mask "
            "keep packed rows apart; others attend across."
        ),
        fixes=(
            safe(
                "model.attention",
                "varlen",
                "Rows of a packed sequence then do not see each other.",
                trl="attn_implementation=flash_attention_2",
                axolotl="attn_implementation=flash_attention_2",
                llama_factory="flash_attn=fa2",
                transformers="attn_implementation=flash_attention_2",
            ),
            safe(
                "trainer.packing",
                "false",
                "Or do not pack.",
                trl="packing",
                axolotl="sample_packing",
                llama_factory="neat_packing",
            ),
        ),
        level=Level.WARN,
    ),
    Trouble(
        code="ERR473",
        name="dataset-load-options",
        family=Family.DATA,
        texts=(
            "Dataset scripts are no longer supported",
            "BuilderConfig * not found",
            "Unknown split",
            "Config name is missing",
            "Please pick one among the available configs",
            "Instruction * corresponds to no data",
            "Bad split:",
            "No (supported) data files found",
        ),
        what="The dataset exists, but not with this configuration, split or loader.",
        why=(
            "Datasets can have several configurations and splits; loading scripts are no "
            "longer run by recent versions of the library."
        ),
        fixes=(
            advice(
                "",
                (
                    "Name configuration and split as the message lists them; for a script "
                    "dataset use its Parquet version, or an older datasets library."
                ),
                trl="dataset_config",
                axolotl="datasets[].name",
            ),
        ),
        explains=("ERR351",),
    ),
    Trouble(
        code="ERR475",
        name="dataloader-worker-failed",
        family=Family.DATA,
        texts=("in DataLoader worker process", "RemoteTraceback"),
        what=(
            "A data-loading or preprocessing worker failed; the reason stands in its own traceback."
        ),
        why="A row raised an exception in the worker, or the worker was killed (memory).",
        fixes=(
            advice(
                "",
                (
                    "Set the number of workers to 0 (or num_proc to 1) once: the real error "
                    "then shows with its row."
                ),
                trl="dataset_num_proc",
                axolotl="dataset_processes",
                transformers="dataloader_num_workers",
            ),
            safe("data.num_processes", "1", "Fewer processes also need less memory."),
        ),
        confidence=Confidence.HEURISTIC,
    ),
)

TROUBLES: tuple[Trouble, ...] = first_failures(
    _TOKENS + _LABELS + _TEMPLATES + _ROWS, run_goes_on=("ERR452",)
)
