"""The recurrence under async scheduling."""

from collections.abc import Callable

import torch
from mambaslots.mcore.recurrence import RecurrenceDriver


class AsyncHost(RecurrenceDriver):
    """Drives a context as the engine does with async scheduling."""

    def overlapped_step(self, finish: tuple[int, ...] = ()) -> None:
        """One step of async scheduling: the next forward is launched before the tokens reach the CPU.

        `finish` ends requests at the token sampled from the forward before.
        """
        context = self.context
        ids = self._active()
        sampled = torch.tensor([self.running[number].sequence[-1] for number in ids])
        context.prepare_requests()
        context.initialize_attention_state(transfer_bookkeeping_to_gpu=False)
        context.copy_async_sched_sample_to_forward(sampled)
        context.transfer_bookkeeping_to_gpu(skip_token_input_ids=True, record_done_event=True)
        context.token_to_input_ids.fill_(-1)  # what was sampled is not on the CPU
        self._forward(context.gpu_view.token_to_input_ids)
        context.mamba_slot_allocator.commit_intermediate_states()
        self.check()
        mask = torch.tensor([number not in finish for number in ids], dtype=torch.uint8)
        _, survivors = context.resolve_requests(mask)
        context.commit_sampled_tokens(sampled[survivors])
        for number in finish:
            del self.running[number]
        for number in self._active():
            self.running[number].sequence.append(self._sample(number, None))

    def async_step(self, finish: tuple[int, ...] = (), admit: Callable[[], object] = lambda: None) -> None:
        """One step of async scheduling without overlap: the pending samples, admission, the next forward."""
        context, ids = self.context, self._active()
        if ids:
            sampled = torch.tensor([self.running[n].sequence[-1] if self._decodes(n) else 0 for n in ids])
            mask = torch.tensor([n not in finish for n in ids], dtype=torch.uint8)
            self._forget(finish, context.update_requests(mask, sampled))
        admit()
        if not self._active():
            return
        context.initialize_attention_state()
        self._forward(context.gpu_view.token_to_input_ids)
        context.mamba_slot_allocator.commit_intermediate_states()
        self.check()
        for number in self._active():
            if self._decodes(number):
                self.running[number].sequence.append(self._sample(number, None))

    def _decodes(self, number: int) -> bool:
        return self.running[number].is_prefilled
