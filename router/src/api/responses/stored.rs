//! What the routes of stored responses, and the one that counts tokens, are asked and answer.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

/// The most items of a page.
const MAX_ITEMS: usize = 100;

/// The answer to a deletion.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DeletedResponse {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    /// Always true.
    pub(crate) deleted: bool,
}

/// The answer of `/v1/responses/input_tokens`.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ResponseInputTokens)]
pub(crate) struct InputTokens {
    pub(crate) object: &'static str,
    pub(crate) input_tokens: usize,
}

/// How a stored response is asked for.
#[derive(Debug, Deserialize, IntoParams)]
pub(crate) struct Retrieval {
    /// Not supported unless false: a stored response is complete.
    pub(crate) stream: Option<bool>,
}

/// The items of a stored response that a client asks for.
#[derive(Debug, Deserialize, IntoParams)]
pub(crate) struct ItemPage {
    /// From 1 to 100; by default 20.
    limit: Option<usize>,
    /// `desc` (the default): the newest first, or `asc`.
    order: Option<String>,
    /// Only items that come after the one with this id.
    after: Option<String>,
}

/// Some of a response's items.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ResponseItemList)]
pub(crate) struct ItemList {
    object: &'static str,
    #[schema(value_type = Vec<Object>)]
    data: Vec<Value>,
    first_id: Option<Value>,
    last_id: Option<Value>,
    /// Whether more items come after the last one.
    has_more: bool,
}

impl ItemPage {
    /// This page of the items, which are given the oldest first. The error is the field and what is wrong with it.
    pub(crate) fn of(&self, mut items: Vec<Value>) -> Result<ItemList, (&'static str, String)> {
        let limit = self.limit.unwrap_or(20);
        if limit == 0 || limit > MAX_ITEMS {
            return Err(("limit", format!("`limit` must be >= 1 and <= {MAX_ITEMS}. Given: {limit}")));
        }
        match self.order.as_deref() {
            None | Some("desc") => items.reverse(),
            Some("asc") => {}
            Some(other) => return Err(("order", format!("`order` must be `asc` or `desc`. Given: {other:?}"))),
        }
        if let Some(after) = &self.after {
            let position = items.iter().position(|item| item["id"] == after.as_str());
            let position = position.ok_or_else(|| ("after", format!("`{after}` is not the id of one of the items")))?;
            items.drain(..=position);
        }
        let has_more = items.len() > limit;
        items.truncate(limit);
        let id = |item: Option<&Value>| item.map(|item| item["id"].clone());
        let (first_id, last_id) = (id(items.first()), id(items.last()));
        Ok(ItemList { object: "list", data: items, first_id, last_id, has_more })
    }
}
