"""State how each number of a report is known: by events, the plan, an estimate, a trace or an ablation."""

from __future__ import annotations

EVIDENCE = {
    "span_ns, window_ns": "events: from the first mark of a rank to its last",
    "compute_ns, kernels": "events: marks around each kernel call",
    "blocking_ns, sender_wait_ns, transfer_wait_ns": "events: marks around each wait and each collective",
    "comm_ns, exposed_comm_ns, overlap_ns": "events: waits, posts, collectives, and transfers with an observed "
    "arrival; a transfer that ended before any rank waited for it is not counted",
    "exposed_copy_ns": "events: marks around the packing of messages and the addition of gradients",
    "shortest_ns, median_ns, longest_ns, duration_ns": "events: from one mark of a training step to the next",
    "attention_ns, longest_attention_ns, attention_share": "events: the part of training steps in passes of attention, "
    "from each pass's first mark to its last",
    "idle_ns, idle_between_kernels_ns, idle_outside_attention_ns": "events: time without any event",
    "transfer_ns, bytes_per_second, observed_messages, observed_bytes": "events: from the time when both ends had "
    "posted to the arrival, as a watching stream or the waiting receiver observed it; otherwise only an upper bound is "
    "known",
    "wait_ns": "events: both ends of each message on one clock, followed to the activity of the late rank",
    "lost_ns, share, usual_share, spread, standard_error, measured, measured_ns": "events: differences of the times "
    "above",
    "core_wait_ns": "events: the scheduler's count of time in which threads of the process could run and had no core",
    "overlapped, isolated, ratio": "events: kernels during communication against the same kernels in isolation; at "
    "level kernels, by the trace",
    "uncertainty_ns, offsets_ns": "events: the clocks of several hosts, aligned on messages",
    "ppm, uncertainty_ppm": "events: an anchor of the device's clock to the host's at each end of the session",
    "watts, megahertz, celsius, joules, sensors": "events: the device's own sensors, read ten times per second",
    "flops_per_second": "events: FLOPs of the plan over marked time",
    "time_ns": "trace: the vendor's own tracer, joined by the launching call",
    "full_step_ns, without_communication_ns, without_computing_ns, without_both_ns, exposed_communication_ns, "
    "exposed_computing_ns, hidden_ns": "ablation: the host's clock around a step without attention's messages, without "
    "its kernels, and without both, the shortest of several runs each; and differences of these",
    "flops, pairs, tiles, bytes, sent_bytes, received_bytes, messages, messages_sent, planned_sent_bytes, planned, "
    "layouts": "plan: exact mask area, and the bytes of the buffers that were sent",
    "flops_per_byte": "plan: FLOPs over the bytes of each row read or written once",
    "predicted_ns, planned_flops_per_second, planned_bytes_per_second, seconds, compute_seconds, link_seconds, "
    "memory_bytes, tflops, intra_node_bandwidth": "estimate: the plan's cost on the hardware that `plans` names, "
    "without contention and without slow ranks",
    "peak_flops_per_second, memory_bytes_per_second": "estimate: the vendor's data sheet, or a short measurement on "
    "this machine, as the peak's source says",
    "ceiling_flops_per_second, ceiling_fraction": "estimate: the roofline, min(peak, FLOPs per byte x memory "
    "bandwidth), and the fraction that was reached",
}
"""Fields of the report, comma-separated -> how they are known, the kind first."""


def evidence_of(field: str) -> str:
    """Return how the numbers of a field are known; "" for a field that counts or names."""
    return next((text for names, text in EVIDENCE.items() if field in names.split(", ")), "")
