//! What protocol a client's payload speaks: see [`agent_common::classify`].
//!
//! Functions of their own, which answer with a number that the verifier does not know ([`hidden`]). They ask
//! much of a payload's first bytes, and all that it learns there it would take along into what comes after.

use agent_common::{
    Stamp, broker,
    classify::{self, HEAD},
    commands::{self, Command},
    http,
    stamp::{
        PROTOCOL_ADOPTED_BUSY, PROTOCOL_AMQP, PROTOCOL_HTTP1, PROTOCOL_MQTT, PROTOCOL_MULTIPLEXED,
        PROTOCOL_NATS, PROTOCOL_OPAQUE, PROTOCOL_STOMP, PROTOCOL_TLS, PROTOCOL_UNKNOWN,
    },
};
use aya_ebpf::bindings::__sk_buff;

use crate::{
    opaque::hidden,
    segment::{self, Segment},
};

/// In place of a protocol: the payload says goodbye, or something else that is owed no answer.
pub const FAREWELL: u32 = 0xff;
/// In place of a protocol: a request that waits ([`Command::Waits`]).
pub const WAIT: u32 = 0xfe;

/// The first bytes of a payload, and its length. (The one that the caller has would be compared as well.)
#[inline(always)]
unsafe fn look(skb: *mut __sk_buff, segment: &Segment) -> ([u8; HEAD], u32) {
    // SAFETY: by the caller.
    unsafe { (segment::head(skb, *segment), hidden(segment.payload)) }
}

/// What the first payload of a connection is: its protocol, or [`FAREWELL`].
///
/// # Safety
/// `skb` must be the program's context, and `segment` what is in it (as for all functions here).
#[inline(never)]
pub unsafe fn first(skb: *mut __sk_buff, segment: &Segment) -> u32 {
    // SAFETY: by contract.
    let (head, length) = unsafe { look(skb, segment) };
    hidden(if classify::is_farewell(&head, length) {
        FAREWELL
    } else {
        classify::protocol(&head, length as usize)
    })
}

/// What an early payload on a connection of an unknown protocol is: [`PROTOCOL_TLS`] if that begins with it, else
/// as [`later`]. `stage` is the connection's.
///
/// # Safety
/// As [`first`].
#[inline(never)]
pub unsafe fn early(skb: *mut __sk_buff, segment: &Segment, stage: u32) -> u32 {
    // SAFETY: by contract.
    let (head, length) = unsafe { look(skb, segment) };
    hidden(if classify::begins_tls(&head, length) {
        PROTOCOL_TLS
    } else if stage != 0 {
        command(&head, length)
    } else if classify::is_farewell(&head, length) {
        FAREWELL
    } else {
        PROTOCOL_OPAQUE
    })
}

/// What a later payload is, on a connection of a protocol that is only timed and that answers each request, or that
/// was adopted: [`FAREWELL`], [`WAIT`], else [`PROTOCOL_OPAQUE`].
///
/// # Safety
/// As [`first`].
#[inline(never)]
pub unsafe fn later(skb: *mut __sk_buff, segment: &Segment) -> u32 {
    // SAFETY: by contract.
    let (head, length) = unsafe { look(skb, segment) };
    hidden(command(&head, length))
}

#[inline(always)]
fn command(head: &[u8; HEAD], length: u32) -> u32 {
    if classify::is_farewell(head, length) {
        return FAREWELL;
    }
    match commands::command(head, length) {
        Command::Asks => PROTOCOL_OPAQUE,
        Command::Tells => FAREWELL,
        Command::Waits => WAIT,
    }
}

/// The protocol of an adopted connection from what its client sends; [`PROTOCOL_UNKNOWN`] while that may be
/// the rest of a request that was under way, or says goodbye.
///
/// # Safety
/// As [`first`]; `stamp` must be the connection's.
#[inline(never)]
pub unsafe fn adopted(skb: *mut __sk_buff, stamp: *mut Stamp, segment: &Segment) -> u32 {
    // SAFETY: by contract, map memory.
    let ((head, length), is_busy) = unsafe {
        let is_busy = (*stamp).protocol == PROTOCOL_ADOPTED_BUSY
            && (&raw const (*stamp).in_end).read_volatile() == (*stamp).syn_timeout_ticks;
        (look(skb, segment), is_busy)
    };
    if classify::is_farewell(&head, length) {
        return hidden(PROTOCOL_UNKNOWN);
    }
    let head = Words(head);
    hidden(match classify::mid_stream(|| again(&head, length)) {
        // Records follow one another in an upload, too.
        PROTOCOL_UNKNOWN | PROTOCOL_TLS if is_busy => PROTOCOL_UNKNOWN,
        PROTOCOL_UNKNOWN => PROTOCOL_OPAQUE,
        protocol => protocol,
    })
}

/// The first bytes of a payload, where they can be read in words.
#[repr(C, align(8))]
struct Words([u8; HEAD]);

/// The same bytes and length, as if nothing was known of them.
#[inline(always)]
fn again(head: &Words, length: u32) -> ([u8; HEAD], u32) {
    let words = (&raw const head.0).cast::<u64>();
    let mut bytes = [0; HEAD];
    for word in 0..HEAD / 8 {
        // SAFETY: within the bytes.
        let read = unsafe { words.add(word).read_volatile() };
        bytes[word * 8..word * 8 + 8].copy_from_slice(&read.to_ne_bytes());
    }
    (bytes, hidden(length))
}

/// What `Stamp::tls_stage` is to be after the first payload, of this protocol, which is not TLS: what a request of
/// HTTP/1 asks for, and whether another protocol answers each request.
///
/// # Safety
/// As [`first`].
#[inline(never)]
pub unsafe fn asks(skb: *mut __sk_buff, segment: &Segment, protocol: u32) -> u32 {
    // SAFETY: by contract.
    let (head, length) = unsafe { look(skb, segment) };
    hidden(match protocol {
        PROTOCOL_HTTP1 => http::asks(&head),
        PROTOCOL_OPAQUE if classify::answers_all(&head, length) => {
            if commands::command(&head, length) == Command::Waits {
                classify::ANSWERS_ALL | classify::WAITS_FIRST
            } else {
                classify::ANSWERS_ALL
            }
        }
        _ => 0,
    })
}

/// Whether a payload says goodbye.
///
/// # Safety
/// As [`first`].
#[inline(always)]
pub unsafe fn is_farewell(skb: *mut __sk_buff, segment: &Segment) -> bool {
    // SAFETY: by contract.
    classify::may_be_farewell(hidden(segment.payload))
        && unsafe { is_control(skb, segment, PROTOCOL_OPAQUE) } != 0
}

/// Whether a payload on a connection with this protocol is no part of a request: a farewell, or what keeps
/// the connection itself. 1 or 0.
///
/// # Safety
/// As [`first`].
#[inline(never)]
pub unsafe fn is_control(skb: *mut __sk_buff, segment: &Segment, protocol: u32) -> u32 {
    // SAFETY: by contract.
    let (head, length) = unsafe { look(skb, segment) };
    hidden(u32::from(match protocol {
        PROTOCOL_TLS => !classify::is_tls_request(&head),
        // (What is published in the meantime prolongs no wait.)
        PROTOCOL_AMQP | PROTOCOL_MQTT | PROTOCOL_NATS | PROTOCOL_STOMP => {
            !broker::asks(protocol, &head, length, broker::CONFIRMS)
        }
        PROTOCOL_MULTIPLEXED => !classify::begins_stream(&head),
        PROTOCOL_HTTP1 => false,
        _ => classify::is_farewell(&head, length),
    }))
}

/// Whether a payload asks a broker for something, on a connection with this protocol on which nothing is owed.
///
/// # Safety
/// As [`first`]; `stamp` must be the connection's.
#[inline(never)]
pub unsafe fn asks_broker(skb: *mut __sk_buff, stamp: *mut Stamp, segment: &Segment) -> bool {
    // SAFETY: by contract, map memory.
    unsafe {
        let (head, length) = look(skb, segment);
        let (protocol, stage) = ((*stamp).protocol, (*stamp).tls_stage);
        let asks = broker::asks(protocol, &head, length, stage);
        if asks {
            (*stamp).tls_stage = broker::asked(protocol, &head, stage);
        }
        hidden(u32::from(asks)) != 0
    }
}

/// Whether a payload begins with a usual method of HTTP/1.
///
/// # Safety
/// As [`first`].
#[inline(never)]
pub unsafe fn is_http_method(skb: *mut __sk_buff, segment: &Segment) -> bool {
    // SAFETY: by contract.
    let (head, _) = unsafe { look(skb, segment) };
    hidden(u32::from(classify::is_http_method(&head))) != 0
}
