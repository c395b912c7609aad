"""From a recipe to the parts of an RL run: prompts, policy, reference, engine, rewards, state."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from homeostat.algorithms.catalogue import policy_gradient
from homeostat.config.algorithm import AnyAlgorithm
from homeostat.config.combinations.check import count_steps
from homeostat.config.curriculum import FunctionFilter
from homeostat.config.loading.live import LiveConfig
from homeostat.config.loading.resume import experiment_digest
from homeostat.config.model_rewards import ClassifierReward
from homeostat.config.rewards import FunctionReward, RewardPlugin, RewardsConfig
from homeostat.config.rollout import DebugConfig
from homeostat.config.run import RunConfig
from homeostat.data.inputs import Inputs, RowSet, open_draws, require_stop_ids
from homeostat.data.prompts import PromptDraws, PromptSet
from homeostat.data.tokenizer import ChatTokenizer, load_tokenizer
from homeostat.errors import DataError
from homeostat.observe.devices import GpuSampler
from homeostat.rewards.combine import RewardMoments, RunningMoments
from homeostat.rewards.functions import files_of, source_of
from homeostat.rewards.pool import RewardPool
from homeostat.rollout.ahead import BUFFER, AheadCollector, BackgroundSampler
from homeostat.rollout.background import Background
from homeostat.rollout.collect import Collector
from homeostat.rollout.engine import Engine
from homeostat.rollout.filters import FilterFunctions, FilterJudges, GroupFilters, SolvedBy
from homeostat.rollout.journal import Journal
from homeostat.rollout.sampler import Sampler
from homeostat.rollout.saved import SavedRollouts
from homeostat.rollout.scorer import Scorer
from homeostat.run.publication.completions import drop_completions_after
from homeostat.run.publication.opening import Feed, open_feed
from homeostat.run.publication.publish import SentWeights
from homeostat.run.session.restarts import Restarts
from homeostat.run.session.reward_problems import ProblemLog
from homeostat.run.session.session import Session
from homeostat.run.wiring.engines import engine_starter, open_engine
from homeostat.run.wiring.inputs import open_prompts, require_vocabulary
from homeostat.run.wiring.loading import load_checkpoint
from homeostat.run.wiring.replay import require_replay
from homeostat.run.wiring.sft_setup import begin_state, describe_model, open_trainer
from homeostat.train.inspection.profile import StepProfiler
from homeostat.train.runtime import Runtime
from homeostat.train.saving.run_state import RlState, RunState
from homeostat.train.trainer import Trainer
from homeostat.types import Role

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RlParts:
    """The parts that the RL loop works with."""

    config: RunConfig
    live: LiveConfig
    tokenizer: ChatTokenizer
    prompts: Inputs[PromptSet]
    trainer: Trainer
    engine: Engine | None
    feed: Feed
    sampler: Sampler | None
    scorer: Scorer
    journal: Journal
    collector: Collector | SavedRollouts
    reward_problems: ProblemLog
    profiler: StepProfiler
    gpus: GpuSampler
    state: RunState
    rl_state: RlState
    total_steps: int

    @property
    def is_complete(self) -> bool:
        return is_complete(self.state, self.total_steps)

    @property
    def ahead(self) -> AheadCollector:
        """Return the collector of a run with rollout.max_staleness."""
        assert isinstance(self.collector, AheadCollector), "only the async loop samples ahead"
        return self.collector

    def sections(self) -> dict[str, dict]:
        """Return what a checkpoint saves besides weights and the run's own state."""
        collector, moments = self.collector, self.collector.moments
        is_async = isinstance(collector, AheadCollector)
        return {
            **({"admitted": collector.state()} if is_async else {}),
            "data": {"step": self.state.step, **self.collector.prompt_sampler.state()},
            "rl": replace(
                self.rl_state,
                rewards_count=moments.total.count,
                rewards_mean=moments.total.mean,
                rewards_squares=moments.total.squares,
                own_rewards={label: list(astuple(own)) for label, own in moments.own.items()},
            ).as_json(),
        }


@contextmanager
def set_up_rl(config: RunConfig, session: Session) -> Iterator[RlParts]:
    """The parts, and an end to what they started."""
    state, runtime = begin_state(config, session)
    tokenizer = load_tokenizer(config.model)
    prompts = open_prompts(config.for_inputs, tokenizer, session)
    total_steps = count_steps(config, len(prompts.train))
    with ExitStack() as stack:
        trainer, origin = stack.enter_context(_loaded(config, prompts, runtime, session))
        rl_state, moments = _rl_state(config.algorithm, session)
        problems = ProblemLog(session)
        rewards = _rewards(config.reward_functions, session, problems)
        version = None if is_complete(state, total_steps) else config.policy_version(state.step)
        engine, feed = stack.enter_context(
            _engine_and_feed(config, session, trainer, tokenizer, rl_state, version=version)
        )
        if engine is not None:
            # Without an engine nothing new is to be scored: the journal holds the values.
            stack.enter_context(rewards)
        gpus = stack.enter_context(contextlib.closing(GpuSampler()))
        sampler = stack.enter_context(_sampler(config, engine))
        scorer = Scorer(rewards, tokenizer, total_steps=total_steps)
        judges = stack.enter_context(
            _filter_judges(config, engine, session, problems, total_steps=total_steps)
        )
        journal = stack.enter_context(contextlib.closing(_journal(session)))
        collector = _collector(
            config,
            prompts.train.rows,
            prompt_sampler=_prompt_sampler(config, prompts.train, session),
            tokenizer=tokenizer,
            sampler=sampler,
            scorer=scorer,
            judges=judges,
            moments=moments,
            journal=journal,
            origin=origin,
        )
        session.begin(total_steps=total_steps, model_line=describe_model(config, trainer.sheet))
        _restore(collector, session)
        yield RlParts(
            config=config,
            live=_live(config, collector, feed, origin),
            tokenizer=tokenizer,
            prompts=prompts,
            trainer=trainer,
            engine=engine,
            feed=feed,
            sampler=sampler,
            scorer=scorer,
            journal=journal,
            collector=collector,
            reward_problems=problems,
            profiler=StepProfiler(config.observe.profiler, session.run_dir, device=runtime.device),
            gpus=gpus,
            state=state,
            rl_state=rl_state,
            total_steps=total_steps,
        )


@contextmanager
def _loaded(
    config: RunConfig, prompts: Inputs[PromptSet], runtime: Runtime, session: Session
) -> Iterator[tuple[Trainer, str]]:
    """Yield the trainer, with the weights that the run starts or resumes from, and the origin of
    its rollouts."""
    with open_trainer(config, runtime, session) as trainer:
        origin = _origin(config, prompts.train.rows, trainer)
        require_vocabulary(prompts, vocab_size=trainer.sheet.vocab_size)
        require_stop_ids(config.rollout, vocab_size=trainer.sheet.vocab_size)
        load_checkpoint(trainer, config, session.resume.found)
        yield trainer, origin


@contextmanager
def _sampler(config: RunConfig, engine: Engine | None) -> Iterator[Sampler | None]:
    """Yield the sampler: one that samples in the background where rollout.max_staleness is set."""
    stall_s = config.engine.stall_s
    if engine is None or config.rollout.max_staleness is None:
        yield None if engine is None else Sampler(engine, seed=config.seed, stall_s=stall_s)
        return
    background = Background(engine, stall_s=stall_s, interrupts=config.rollout.partial)
    with contextlib.closing(background):
        yield BackgroundSampler(background, seed=config.seed)


def _restore(collector: Collector | SavedRollouts, session: Session) -> None:
    """Admit again what the checkpoint had admitted and not trained on."""
    found = session.resume.found
    if not isinstance(collector, AheadCollector) or collector.sampler is None:
        return
    if found is not None and "admitted" in found.state:
        collector.restore(found.section("admitted"), found.path / BUFFER)


@contextmanager
def _engine_and_feed(
    config: RunConfig,
    session: Session,
    trainer: Trainer,
    tokenizer: ChatTokenizer,
    rl_state: RlState,
    *,
    version: int | None,
) -> Iterator[tuple[Engine | None, Feed]]:
    """Open the engine with its first weights, and the part that publishes later ones. `version` is
    that of the trainer's weights; None if nothing is left to sample."""
    restarts = Restarts(config.engine.max_restarts, session)
    with ExitStack() as stack:
        engine = start = None
        only_trains = config.debug is not None and config.debug.mode == "train_only"
        if version is not None and not only_trains:
            start = engine_starter(config, trainer, tokenizer, session)
            engine = open_engine(
                config, trainer, tokenizer, session, version=version, restarts=restarts, start=start
            )
            stack.callback(engine.close)
        feed = open_feed(
            config.for_publication,
            engine,
            trainer,
            rl_state,
            session,
            version=config.policy_version(session.start_step),
            restarts=restarts,
            start=start,
        )
        stack.callback(feed.close)
        can = engine.capabilities if engine is not None else None
        require_replay(config.model.moe, trainer.sheet.moe, can)
        yield engine, feed


def is_complete(state: RunState, total_steps: int) -> bool:
    return state.step >= total_steps or state.stopped_early


def _origin(config: RunConfig, prompts: PromptSet, trainer: Trainer) -> str:
    """Names all that rollouts come from: settings, prompts, reward files, the first weights."""
    rewards = config.reward_functions.functions
    functions = [r.path for r in rewards if isinstance(r, FunctionReward)]
    functions += [r.type for r in rewards if isinstance(r, RewardPlugin)]
    functions += [f.path for f in config.rollout.filters if isinstance(f, FunctionFilter)]
    sources = [hashlib.sha256(source_of(path)).hexdigest() for path in functions]
    weights = dict(trainer.checksums(Role.POLICY))
    parts: list[Any] = [experiment_digest(config), prompts.fingerprint, sources, weights]
    # Only if there are any: journals of other runs keep their origin.
    if models := [files_of(r.path) for r in rewards if isinstance(r, ClassifierReward)]:
        parts.append(models)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _collector(
    config: RunConfig,
    prompts: PromptSet,
    *,
    prompt_sampler: PromptDraws,
    tokenizer: ChatTokenizer,
    sampler: Sampler | None,
    scorer: Scorer,
    judges: FilterJudges | None,
    moments: RewardMoments,
    journal: Journal,
    origin: str,
) -> Collector | SavedRollouts:
    """Return the source of rollouts: the engine and this run's journal, or another run's."""
    filters = GroupFilters(
        config.rollout,
        dynamic=policy_gradient(config.algorithm).dynamic_sampling,
        solved_by=SolvedBy.of(config.rollout, config.reward_functions),
    )
    saved = saved_journal(config.debug)
    if saved is not None:
        return SavedRollouts(
            config.rollout,
            config.reward_functions,
            filters=filters,
            prompts=prompts,
            prompt_sampler=prompt_sampler,
            tokenizer=tokenizer,
            moments=moments,
            saved=saved,
            moe=config.model.moe,
        )
    kind = Collector if config.rollout.max_staleness is None else AheadCollector
    return kind(
        config.rollout,
        config.reward_functions,
        filters=filters,
        judges=judges,
        prompts=prompts,
        prompt_sampler=prompt_sampler,
        tokenizer=tokenizer,
        sampler=sampler,
        scorer=scorer,
        moments=moments,
        journal=journal,
        origin=origin,
        moe=config.model.moe,
        is_strided=config.is_strided,
    )


def _live(
    config: RunConfig, collector: Collector | SavedRollouts, feed: Feed, origin: str
) -> LiveConfig:
    """Return the run's live config, which tells sampling and publication of edits."""
    live = LiveConfig(config)
    # Rollouts of another run have their own origin, and their settings cannot be edited.
    if isinstance(collector, Collector):
        live.on_change(lambda: collector.reconfigure(live.now.rollout, origin=live.origin(origin)))
    if isinstance(feed, SentWeights):
        live.on_change(lambda: feed.reconfigure(live.now.for_publication))
    return live


def _journal(session: Session) -> Journal:
    """Open the run's journal. Its groups beyond the resume point are replayed; saved completions of
    those steps are removed, because they are written again."""
    drop_completions_after(session.run_dir.completions, session.start_step)
    journal = Journal(session.run_dir.journal)
    if session.changes_course:
        # Groups of a policy that other settings led to: of no use, and not to be found later.
        journal.drop_after(session.start_step)
    return journal


def _rewards(config: RewardsConfig, session: Session, problems: ProblemLog) -> RewardPool:
    return RewardPool(
        config,
        on_problem=problems.take,
        log_file=session.run_dir.path / "rewards.log",
        cache=session.run_dir.path / "judge",
        on_span=session.timeline.add,
    )


@contextmanager
def _filter_judges(
    config: RunConfig,
    engine: Engine | None,
    session: Session,
    problems: ProblemLog,
    *,
    total_steps: int,
) -> Iterator[FilterJudges | None]:
    """Yield what asks the filters that are users' functions; None if there are none to ask."""
    rewards = config.reward_functions
    functions = tuple(f for f in config.rollout.filters if isinstance(f, FunctionFilter))
    if not functions or engine is None:
        yield None
        return
    settings = FilterFunctions(functions, rewards.timeout_s)
    log_file = session.run_dir.path / "filters.log"
    with RewardPool(
        settings, on_problem=problems.take_filter, log_file=log_file, noun="filter"
    ) as pool:
        yield FilterJudges(pool, rewards, total_steps=total_steps)


def _prompt_sampler(config: RunConfig, prompts: RowSet[PromptSet], session: Session) -> PromptDraws:
    found = session.resume.found
    state = found.section("data") if found is not None else None
    return open_draws(
        config.data, config.rollout.curriculum, prompts, seed=config.seed, state=state
    )


def _rl_state(algorithm: AnyAlgorithm, session: Session) -> tuple[RlState, RewardMoments]:
    found, kl = session.resume.found, policy_gradient(algorithm).kl
    if found is None:
        coefficient = kl.coefficient if kl is not None else None
        return RlState(kl_coefficient=coefficient), RewardMoments()
    place = str(found.state_file)
    state = RlState.from_json(found.section("rl"), place=place)
    total = RunningMoments(state.rewards_count, state.rewards_mean, state.rewards_squares)
    own = {label: RunningMoments(*numbers) for label, numbers in state.own_rewards.items()}
    return state, RewardMoments(total, own)


def saved_journal(debug: DebugConfig | None) -> Journal | None:
    """The journal that a debug mode takes its rollouts from."""
    if debug is None or debug.rollouts is None:
        return None
    folder = Path(debug.rollouts) / "journal"
    if not folder.is_dir():
        where = f"debug.rollouts: {folder.absolute()}"
        raise DataError(f"{where} does not exist. Name the directory of a run that sampled.")
    return Journal(folder)
