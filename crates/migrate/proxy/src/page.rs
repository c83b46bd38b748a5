//! The live page: what the proxy and a migration do, and the button for the switch.
//!
//! One file holds the page, its style and its script; the script gets the state once a second as a server-sent event. The
//! page has no cookies. An order to switch needs the operator's token in a header, which no other site's page can send.

use crate::http::{Answer, HttpReply, HttpRequest, without_port};
use crate::proxy::Proxy;
use crate::tenant::Tenant;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use stillpoint_migrate_control::{Activity, PageConfig, PoolStatus};
use stillpoint_migrate_postgres::fill_random;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

/// The page; `@NONCE@` stands for a number that is used once.
const PAGE: &str = include_str!("page.html");
/// Interval of events, and the time in which a client must take one.
const EVENT_INTERVAL: Duration = Duration::from_secs(1);
const EVENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Most tenants and pinned sessions of an event.
const TENANTS_MAX: usize = 50;
const PINNED_MAX: usize = 50;
/// Characters of a text from a client or server.
const TEXT_CHARS_MAX: usize = 200;

/// Answers requests of the page; `None` if there is no page.
pub(crate) fn route(request: &HttpRequest, proxy: &Arc<Proxy>) -> Option<Answer> {
    let settings = proxy.settings();
    let page = settings.config.page.as_ref()?;
    let reply = match (&*request.method, &*request.path) {
        _ if !page.is_host(&request.host) => HttpReply::text(
            "403 Forbidden",
            "the page is not shown under this name: use 127.0.0.1, or add the name to `page.hosts`\n",
        ),
        ("GET", "/") => show(),
        ("GET", "/events") => return Some(Answer::Events),
        ("POST", "/switch") => order_switch(request, page, proxy),
        (_, "/" | "/events" | "/switch") => HttpReply::text("405 Method Not Allowed", "another method is needed\n"),
        _ => HttpReply::text("404 Not Found", "see / and /metrics\n"),
    };
    Some(Answer::Reply(reply))
}

fn show() -> HttpReply {
    let mut random = [0; 16];
    fill_random(&mut random);
    let nonce: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let head = format!(
        "Content-Security-Policy: default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n\
         X-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\nReferrer-Policy: no-referrer\r\n\
         Cross-Origin-Resource-Policy: same-origin\r\nCache-Control: no-store\r\n"
    );
    let body = PAGE.replace("@NONCE@", &nonce);
    HttpReply { status: "200 OK", content_type: "text/html; charset=utf-8", head, body }
}

fn order_switch(request: &HttpRequest, page: &PageConfig, proxy: &Arc<Proxy>) -> HttpReply {
    let settings = proxy.settings();
    let Some(token) = &settings.page_token else {
        return HttpReply::text("403 Forbidden", "the button is off: the configuration has no `page.token`\n");
    };
    let from_here = |origin: &String| {
        let host = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        host.is_some_and(|host| page.is_host(without_port(host)))
    };
    if !request.origin.as_ref().is_none_or(from_here) {
        return HttpReply::text("403 Forbidden", "the request is another site's\n");
    }
    if !request.token.as_ref().is_some_and(|sent| token.is(sent)) {
        tracing::warn!("an order to switch had a wrong token");
        return HttpReply::text("403 Forbidden", "the token is wrong\n");
    }
    let named = std::str::from_utf8(&request.body).ok();
    let tenant = named.and_then(|name| proxy.tenants().into_iter().find(|tenant| tenant.name == name));
    match tenant.map(|tenant| (tenant.order_switch(), tenant)) {
        Some((Ok(()), tenant)) => {
            tracing::info!(tenant = tenant.name, "the switch was ordered on the live page");
            HttpReply::text("202 Accepted", "the switch is ordered\n")
        }
        Some((Err(why), _)) => HttpReply::text("409 Conflict", format!("{why}\n")),
        None => HttpReply::text("404 Not Found", "there is no such database\n"),
    }
}

/// Sends the state once a second until the client leaves.
pub(crate) async fn stream_events(stream: &mut TcpStream, proxy: &Proxy) {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\n\
                X-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\nretry: 2000\n\n";
    let mut bytes = head.as_bytes().to_vec();
    loop {
        bytes.extend(format!("data: {}\n\n", state(proxy)).bytes());
        match tokio::time::timeout(EVENT_TIMEOUT, stream.write_all(&bytes)).await {
            Ok(Ok(())) => bytes.clear(),
            _ => return,
        }
        tokio::time::sleep(EVENT_INTERVAL).await;
    }
}

/// State for the page.
fn state(proxy: &Proxy) -> Value {
    let mut sessions: BTreeMap<String, SessionCounts> = BTreeMap::new();
    let entries = proxy.directory.all();
    for entry in &entries {
        let counts = sessions.entry(entry.tenant.clone()).or_default();
        *counts.by_activity.entry(activity_name(entry.activity())).or_default() += 1;
        counts.prepared += usize::from(entry.is_prepared());
        if let Some(why) = entry.kept()
            && counts.kept.len() < PINNED_MAX
        {
            counts.kept.push(json!({"id": entry.id, "user": shorten(&entry.user), "why": shorten(&why)}));
        }
        let Some(why) = entry.pinned() else { continue };
        counts.pinned_count += 1;
        if counts.pinned.len() < PINNED_MAX {
            counts.pinned.push(json!({"id": entry.id, "user": shorten(&entry.user), "why": shorten(&why)}));
        }
    }
    let mut tenants = proxy.tenants();
    // Databases that move come first.
    tenants.sort_by_key(|tenant| tenant.migration().is_none());
    let shown = tenants.iter().take(TENANTS_MAX);
    let shown = shown.map(|tenant| {
        let pool = tenant.pool_status(&entries);
        tenant_state(tenant, sessions.remove(&tenant.name).unwrap_or_default(), pool)
    });
    json!({
        "v": 1,
        "tenants": shown.collect::<Vec<_>>(),
        "more_tenants": tenants.len().saturating_sub(TENANTS_MAX),
        "standby": proxy.standby.taken_by().is_some(),
        "button": proxy.settings().page_token.is_some(),
    })
}

/// Sessions of a tenant.
#[derive(Debug, Default)]
struct SessionCounts {
    by_activity: BTreeMap<&'static str, usize>,
    prepared: usize,
    pinned: Vec<Value>,
    /// Sessions that keep their server connections.
    kept: Vec<Value>,
    pinned_count: usize,
}

fn tenant_state(tenant: &Tenant, sessions: SessionCounts, pool: Option<PoolStatus>) -> Value {
    let view = tenant.migration();
    json!({
        "name": shorten(&tenant.name),
        "server": shorten(&tenant.server().to_string()),
        "target": tenant.target().map(|target| shorten(&target.server.to_string())),
        "paused": tenant.is_paused(),
        "waits": tenant.waits.counts(),
        "sessions": sessions.by_activity,
        "prepared": sessions.prepared,
        "pinned": sessions.pinned,
        "pinned_count": sessions.pinned_count,
        "mirror": tenant.mirror().map(|mirror| mirror.report()).map(|report| {
            json!({"seen": report.seen, "compared": report.compared(), "differ": report.differing()})
        }),
        "pool": pool,
        "kept": sessions.kept,
        "takes_orders": view.as_ref().is_some_and(|view| view.takes_orders()),
        "age_ms": view.as_ref().map(|view| view.age.as_millis() as u64),
        "progress": view.map(|view| view.progress),
    })
}

fn activity_name(activity: Activity) -> &'static str {
    match activity {
        Activity::Starting => "logging in",
        Activity::Idle => "idle",
        Activity::Active => "active",
        Activity::InTransaction => "in a transaction",
        Activity::Parked => "paused",
    }
}

fn shorten(text: &str) -> String {
    text.chars().take(TEXT_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_needs_nothing_from_other_places_and_shows_texts_as_texts() {
        for forbidden in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "DOMParser",
            "cookie",
            "localStorage",
            "sessionStorage",
            "src=",
            "href=",
            " style=",
            "onclick=",
        ] {
            assert!(!PAGE.contains(forbidden), "{forbidden}");
        }
        let urls = PAGE.match_indices("http").map(|(at, _)| &PAGE[at..PAGE.len().min(at + 26)]);
        assert_eq!(urls.collect::<Vec<_>>(), ["http://www.w3.org/2000/svg"], "a name, not an address");
        assert_eq!(PAGE.matches("@NONCE@").count(), 2);
        let page = show();
        assert!(!page.body.contains("@NONCE") && page.head.contains("default-src 'none'"), "{}", page.head);
        assert_ne!(page.body, show().body, "a number that is used once");
    }
}
