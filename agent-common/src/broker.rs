//! Brokers of messages: which of a client's messages are owed an answer. Most that are published are not, and a
//! program that has published one waits for nothing. Runs in the kernel, and is tested natively.
//!
//! A message may be longer than a segment, and what begins in its middle may look like anything. So where it is
//! not certain that something is asked, nothing is: an exchange that is missed harms less than an answer that
//! is waited for and never comes.

use crate::{
    classify::{HEAD, word},
    stamp::{PROTOCOL_AMQP, PROTOCOL_MQTT, PROTOCOL_NATS, PROTOCOL_STOMP},
};

/// The client has asked for confirms: what it publishes is answered. Of AMQP, in `Stamp::tls_stage`; the egress
/// hook is the writer.
pub const CONFIRMS: u32 = 1 << 8;

/// The protocol of a broker, from the first payload bytes that a client sends; `None` when it is another one.
/// (AMQP is known by its preface, in [`crate::classify`].)
#[inline(always)]
pub fn protocol(head: &[u8; HEAD]) -> Option<u32> {
    if is_mqtt_connect(head) {
        Some(PROTOCOL_MQTT)
    } else if word(head) == u32::from_ne_bytes(*b"CONN") {
        // Of HTTP, a host follows behind one space.
        match [head[7], head[8]] {
            [b' ', b'{'] => Some(PROTOCOL_NATS),
            [b'\n', _] | [b'\r', b'\n'] => Some(PROTOCOL_STOMP),
            _ => None,
        }
    } else if word(head) == u32::from_ne_bytes(*b"STOM") && head[4] == b'P' {
        Some(PROTOCOL_STOMP)
    } else {
        None
    }
}

/// MQTT's CONNECT (OASIS, section 3.1): type, remaining length of one or two bytes, and the name "MQTT" or
/// "MQIsdp" behind its own length.
#[inline(always)]
fn is_mqtt_connect(head: &[u8; HEAD]) -> bool {
    let named = |at: usize| head[at] == 0 && head[at + 2] == b'M' && head[at + 3] == b'Q';
    head[0] == 0x10 && (named(2) || named(3))
}

/// MQTT in the middle of a connection's life: PINGREQ, or a whole PUBLISH whose topic has less than 256 bytes.
#[inline(always)]
pub(crate) fn is_mqtt_packet(head: &[u8; HEAD], length: u32) -> bool {
    let is_publish = head[0] >> 4 == 3 && head[1] < 0x80 && head[2] == 0;
    (length == 2 && head[0] == 0xc0)
        || (length >= 5 && is_publish && u32::from(head[1]) + 2 == length)
}

/// NATS in the middle of a connection's life: something is published.
#[inline(always)]
pub(crate) fn is_nats_message(head: &[u8; HEAD], _: u32) -> bool {
    word(head) == u32::from_ne_bytes(*b"PUB ") || word(head) == u32::from_ne_bytes(*b"HPUB")
}

/// Whether a payload of so many bytes, sent while nothing is owed on a connection with this protocol, asks for
/// something. `stage` is the connection's.
#[inline(always)]
pub fn asks(protocol: u32, head: &[u8; HEAD], length: u32, stage: u32) -> bool {
    match protocol {
        PROTOCOL_MQTT => mqtt_asks(head, length),
        // What is published, and subscriptions, are answered by nothing (or by +OK, which comes by itself).
        PROTOCOL_NATS => word(head) == u32::from_ne_bytes(*b"PING"),
        // Only where a frame asks for a receipt, which stands somewhere in its head.
        PROTOCOL_STOMP => false,
        PROTOCOL_AMQP => amqp_asks(head, stage & CONFIRMS != 0),
        _ => true,
    }
}

/// MQTT (OASIS, section 2.2.1): what is published with QoS 0, acknowledgements and DISCONNECT are answered by
/// nothing.
#[inline(always)]
fn mqtt_asks(head: &[u8; HEAD], length: u32) -> bool {
    let is_whole = head[1] < 0x80 && u32::from(head[1]) + 2 <= length;
    match head[0] {
        // PUBLISH: the length of a topic, behind that of the rest, is below 256.
        first if first >> 4 == 3 && first & 6 != 0 => {
            let at = if head[1] < 0x80 {
                2
            } else if head[2] < 0x80 {
                3
            } else {
                4
            };
            head[at] == 0
        }
        // SUBSCRIBE, UNSUBSCRIBE.
        0x82 | 0xa2 => is_whole,
        // PUBREL, alone. (Of four bytes only the first is at hand.)
        0x62 => head[1] <= 4 && matches!(length, 4..=6),
        // CONNECT; PINGREQ.
        0x10 => is_mqtt_connect(head),
        0xc0 => head[1] == 0 && length >= 2,
        _ => false,
    }
}

/// AMQP 0-9-1: frames are a type, a channel, a size, and of a method its class and number. What is published
/// without confirms is answered by nothing, nor are acknowledgements, content and heartbeats. Of AMQP 1.0, whose
/// frames begin with their size, all but an empty frame asks.
#[inline(always)]
fn amqp_asks(head: &[u8; HEAD], confirms: bool) -> bool {
    const METHOD: u8 = 1;
    if head[0] == 0 {
        return word(head) != u32::from_ne_bytes([0, 0, 0, 8]);
    }
    if head[0] != METHOD {
        return false;
    }
    match amqp_method(head) {
        BASIC_PUBLISH => confirms,
        BASIC_ACK | BASIC_REJECT | BASIC_NACK => false,
        _ => true,
    }
}

const BASIC_PUBLISH: u32 = 60 << 16 | 40;
const BASIC_ACK: u32 = 60 << 16 | 80;
const BASIC_REJECT: u32 = 60 << 16 | 90;
/// An extension of RabbitMQ's, as is the next one.
const BASIC_NACK: u32 = 60 << 16 | 120;
const CONFIRM_SELECT: u32 = 85 << 16 | 10;

#[inline(always)]
fn amqp_method(head: &[u8; HEAD]) -> u32 {
    u32::from_be_bytes([head[7], head[8], head[9], head[10]])
}

/// What a connection is from here on, where this payload asks for something on it.
#[inline(always)]
pub fn asked(protocol: u32, head: &[u8; HEAD], stage: u32) -> u32 {
    if protocol == PROTOCOL_AMQP && head[0] != 0 && amqp_method(head) == CONFIRM_SELECT {
        stage | CONFIRMS
    } else {
        stage
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::classify;
    use crate::stamp::{PROTOCOL_OPAQUE, PROTOCOL_TUNNEL};
    use proptest::prelude::*;

    fn head(text: &[u8]) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        // As much as the hook loads.
        let loaded = match text.len() {
            24.. => 24,
            12.. => 12,
            5.. => 5,
            _ => 1,
        };
        let loaded = loaded.min(text.len());
        head[..loaded].copy_from_slice(&text[..loaded]);
        head
    }

    #[test]
    fn protocols() {
        for (bytes, wanted) in [
            (
                &b"\x10\x0f\0\x04MQTT\x04\x02\0\x3c\0\x03abc"[..],
                PROTOCOL_MQTT,
            ),
            (
                b"\x10\xc8\x01\0\x04MQTT\x05\x02\0\x3c\0\x03abc",
                PROTOCOL_MQTT,
            ),
            (
                b"\x10\x11\0\x06MQIsdp\x03\x02\0\x3c\0\x03abc",
                PROTOCOL_MQTT,
            ),
            (
                b"\x10\x0f\0\x04WHAT\x04\x02\0\x3c\0\x03abc",
                PROTOCOL_OPAQUE,
            ),
            (b"CONNECT {\"verbose\":false}\r\nPING\r\n", PROTOCOL_NATS),
            (b"CONNECT\naccept-version:1.2\n\n\0", PROTOCOL_STOMP),
            (b"CONNECT\r\naccept-version:1.2\r\n\r\n\0", PROTOCOL_STOMP),
            (b"STOMP\naccept-version:1.2\n\n\0", PROTOCOL_STOMP),
            (b"CONNECT a.example:443 HTTP/1.1\r\n\r\n", PROTOCOL_TUNNEL),
            (b"STOMACH\n....", PROTOCOL_OPAQUE),
        ] {
            let said = classify::protocol(&head(bytes), bytes.len());
            assert_eq!(said, wanted, "{bytes:?}");
        }
    }

    #[track_caller]
    fn assert_asks(protocol: u32, bytes: &[u8], wanted: bool) {
        let said = asks(protocol, &head(bytes), bytes.len() as u32, 0);
        assert_eq!(said, wanted, "{bytes:?}");
    }

    #[test]
    fn mqtt() {
        for (bytes, wanted) in [
            // PUBLISH with QoS 0: as it is, retained, and with the bit of a repetition, which must not be set.
            (&b"\x30\x07\0\x01t21.5"[..], false),
            (b"\x31\x07\0\x01t21.5", false),
            (b"\x38\x07\0\x01t21.5", false),
            (b"\x39\x07\0\x01t21.5", false),
            (b"\x30\x02\0\0", false),
            (b"\x30\xff\xff\x03\0\x01t21.5 and a lot more of it", false),
            // QoS 1 and 2.
            (b"\x32\x09\0\x01t\0\x0121.5", true),
            (b"\x3a\x09\0\x01t\0\x0121.5", true),
            (b"\x34\x09\0\x01t\0\x0121.5", true),
            (b"\x33\x82\x01\0\x01t\0\x0121.5 and more", true),
            (b"\x35\x82\x80\x01\0\x01t\0\x0121.5 and more", true),
            (b"\x62\x02\0\x01", true),
            (b"\x82\x06\0\x01\0\x01t\0", true),
            (b"\xa2\x05\0\x01\0\x01t", true),
            (b"\xc0\0", true),
            // PUBACK, PUBREC, PUBCOMP; DISCONNECT.
            (b"\x40\x02\0\x01", false),
            (b"\x50\x02\0\x01", false),
            (b"\x70\x02\0\x01", false),
            (b"\xe0\0", false),
            // The middle of a message.
            (b"45.2, and so on and on", false),
            (b"3\" wide", false),
            (b"bis repetita placent", false),
            (b"bis r", false),
            (b"b", false),
            (b"\x82", false),
            (b"\xc0", false),
            (b"", false),
        ] {
            assert_asks(PROTOCOL_MQTT, bytes, wanted);
        }
    }

    #[test]
    fn nats_and_stomp() {
        for (bytes, wanted) in [
            (&b"PING\r\n"[..], true),
            (b"PUB foo 5\r\nhello\r\n", false),
            (b"HPUB foo 22 27\r\nNATS/1.0\r\n", false),
            (b"SUB foo 1\r\n", false),
            (b"PONG\r\n", false),
            (b"hello\r\n", false),
        ] {
            assert_asks(PROTOCOL_NATS, bytes, wanted);
        }
        assert_asks(
            PROTOCOL_STOMP,
            b"SEND\ndestination:/queue/a\n\nhello\0",
            false,
        );
        assert_asks(PROTOCOL_STOMP, b"\n", false);
    }

    #[test]
    fn amqp() {
        for (bytes, wanted) in [
            // queue.declare, channel.open, basic.get.
            (&b"\x01\0\x01\0\0\0\x0d\0\x32\0\x0a\0\0\x01q"[..], true),
            (b"\x01\0\x01\0\0\0\x05\0\x14\0\x0a\0\xce", true),
            (b"\x01\0\x01\0\0\0\x0d\0\x3c\0\x46\0\0\x01q", true),
            // basic.publish, ack, reject, nack.
            (b"\x01\0\x01\0\0\0\x0d\0\x3c\0\x28\0\0\x01q", false),
            (b"\x01\0\x01\0\0\0\x0d\0\x3c\0\x50\0\0\x01q", false),
            (b"\x01\0\x01\0\0\0\x0d\0\x3c\0\x5a\0\0\x01q", false),
            (b"\x01\0\x01\0\0\0\x0d\0\x3c\0\x78\0\0\x01q", false),
            // The content's head and body, a heartbeat, the middle of a body.
            (b"\x02\0\x01\0\0\0\x0e\0\x3c\0\0\0\0\0\0\0\0", false),
            (b"\x03\0\x01\0\0\0\x05hello\xce", false),
            (b"\x08\0\0\0\0\0\0\xce", false),
            (b"the middle of a body", false),
            // AMQP 1.0: an empty frame, and one with something in it.
            (b"\0\0\0\x08\x02\0\0\0", false),
            (b"\0\0\0\x20\x02\0\0\0\0\x53\x14\xc0\x10\x05", true),
        ] {
            assert_asks(PROTOCOL_AMQP, bytes, wanted);
        }
        // With confirms, what is published is answered.
        let publish = head(b"\x01\0\x01\0\0\0\x0d\0\x3c\0\x28\0\0\x01q");
        let select = head(b"\x01\0\x01\0\0\0\x05\0\x55\0\x0a\0\xce");
        assert!(asks(PROTOCOL_AMQP, &select, 13, 0));
        let stage = asked(PROTOCOL_AMQP, &select, 1);
        assert_eq!(stage, 1 | CONFIRMS);
        assert!(asks(PROTOCOL_AMQP, &publish, 21, stage));
        assert_eq!(asked(PROTOCOL_AMQP, &publish, 1), 1);
        assert_eq!(asked(PROTOCOL_MQTT, &select, 1), 1);
    }

    proptest! {
        #[test]
        fn nothing_panics(bytes: [u8; HEAD], length: u32, of in 0u32..16, stage: u32) {
            let _ = protocol(&bytes);
            let _ = asks(of, &bytes, length, stage);
            let _ = asked(of, &bytes, stage);
        }
    }
}
