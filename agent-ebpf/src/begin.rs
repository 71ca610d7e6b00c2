//! How exchanges begin: with a request, with what a server owes from established on, and with data in
//! the SYN.

use agent_common::{
    OTHER_ROW, Row, Stamp,
    retry::ENDED_WELL,
    stamp::{
        KIND_GREETING, KIND_HANDSHAKE, KIND_REQUEST, PROTOCOL_OPAQUE, PROTOCOL_TLS,
        PROTOCOL_UNKNOWN, pack_request,
    },
};
use aya_ebpf::programs::SkBuffContext;

use crate::{
    atomics, maps,
    opaque::hidden,
    segment::Segment,
    speaks::{self, FAREWELL},
    tls,
};

/// An exchange begins.
///
/// # Safety
/// `stamp` must be the connection's and `row` its row.
#[inline(always)]
pub unsafe fn begin(stamp: *mut Stamp, row: *mut Row, number: u32, now: u64, kind: u64) {
    // SAFETY: by the caller, map memory.
    unsafe {
        if kind == KIND_HANDSHAKE {
            atomics::add(&raw mut (*row).handshakes, 1);
        } else {
            count_request(row);
        }
        (*stamp).begun_ns = now;
        if (*stamp).ended != ENDED_WELL {
            (*stamp).ended = ENDED_WELL;
        }
        (&raw mut (*stamp).request).write_volatile(pack_request(number, now / 1000) | kind);
    }
}

/// Counts a request; the first of a row borrows a histogram.
///
/// # Safety
/// As [`begin`].
#[inline(always)]
pub unsafe fn count_request(row: *mut Row) {
    // SAFETY: map memory.
    unsafe {
        if atomics::add(&raw mut (*row).requests, 1) == 0
            && let Ok(Some(slot)) = maps::FREE_HISTOGRAMS.pop()
        {
            (*row).response_histogram = slot + 1;
        }
    }
}

/// Data with the SYN (TCP Fast Open): what it is. Whether it arrived shows at established.
///
/// # Safety
/// `stamp` must be the connection's.
#[inline(always)]
pub unsafe fn sent_with_syn(ctx: &SkBuffContext, stamp: *mut Stamp, segment: Segment) {
    // SAFETY: by the caller.
    unsafe {
        let protocol = match speaks::first(ctx.skb.skb, &segment) {
            FAREWELL => PROTOCOL_OPAQUE,
            protocol => protocol,
        };
        let protocol = hidden(protocol);
        (*stamp).protocol = protocol;
        (*stamp).out_end = segment.end;
        (*stamp).request_seq = segment.begin();
        if protocol == PROTOCOL_TLS {
            tls::sent(ctx.skb.skb, stamp, &segment);
        } else {
            (*stamp).tls_stage = speaks::asks(ctx.skb.skb, &segment, protocol);
        }
    }
}

/// Established: what is owed from here on. `acked` is the first sequence number that the peer has
/// not acknowledged.
///
/// # Safety
/// `stamp` must be the connection's and `row` its row.
#[inline(always)]
pub unsafe fn established(stamp: *mut Stamp, row: *mut Row, now: u64, acked: u32) {
    // SAFETY: by contract.
    unsafe {
        if (*stamp).protocol != PROTOCOL_UNKNOWN {
            if acked.wrapping_sub((*stamp).out_end) as i32 >= 0 {
                // The request came with the SYN.
                let is_tls = (*stamp).protocol == PROTOCOL_TLS;
                let kind = if is_tls { KIND_HANDSHAKE } else { KIND_REQUEST };
                atomics::add32(&raw mut (*row).spoke_first, 1);
                begin(stamp, row, 1, now, kind);
                return;
            }
            // The peer did not take it; it is sent again.
            (*stamp).protocol = PROTOCOL_UNKNOWN;
            (*stamp).out_end = 0;
            (*stamp).tls_stage = 0;
        }
        let greeted = (&raw const (*row).greeted).read_volatile();
        // (Row `other` is of many destinations.)
        if (*stamp).row != OTHER_ROW
            && Row::greets(greeted, (&raw const (*row).spoke_first).read_volatile())
        {
            begin(stamp, row, 1, now, KIND_GREETING);
        }
    }
}
