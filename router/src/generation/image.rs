//! The images of a request: from what clients send to their places among the tokens of the prompt.

use std::hash::{BuildHasherDefault, DefaultHasher};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use futures::stream::{self, StreamExt, TryStreamExt};
use penstock_scheduler::SubmitError;
use tokio::time::timeout;

use super::validation::ValidationError;
use crate::fetch::{Fetcher, Url};
use crate::sequence::{EncodedImage, Image, ImageInput, ImageSpan, image_groups};
use crate::text::TokenSpan;

/// Images of one prompt. More would rarely fit into a context.
const MAX_IMAGES: usize = 64;
/// Images of one prompt that are fetched at the same time. Further ones wait, so that one prompt takes a small part of the server's fetches.
const MAX_FETCHES: usize = 4;
/// Characters of a URL that an error message shows.
const MAX_SHOWN: usize = 40;

/// An image as a client sent it. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct ImageSource {
    /// Path of the image in the request.
    pub(crate) path: String,
    /// A data URI, or, where the server fetches images, an http or https URL.
    pub(crate) url: Arc<str>,
}

/// An image whose source has been read.
#[derive(Debug)]
pub(super) enum GivenImage {
    File(Image),
    At { path: String, url: Url },
}

/// The refusal of an image, for a model that reads none.
pub(super) fn unreadable(source: &ImageSource) -> ValidationError {
    let problem = "images are not supported: this model reads only text".to_owned();
    ValidationError::Item { path: source.path.clone(), problem }
}

/// Checks the sources, and decodes data URIs. `fetches`: whether the server fetches images from URLs.
pub(super) fn read(sources: &[ImageSource], fetches: bool) -> Result<Vec<GivenImage>, ValidationError> {
    if let Some(source) = sources.get(MAX_IMAGES) {
        let problem = format!("a prompt can have at most {MAX_IMAGES} images, this one has {}", sources.len());
        return Err(ValidationError::Item { path: source.path.clone(), problem });
    }
    sources.iter().map(|source| read_one(source, fetches)).collect()
}

/// The files. Dropping the future ends all fetches.
pub(super) async fn fetch(images: Vec<GivenImage>, fetcher: Option<&Fetcher>) -> Result<Vec<Image>, ValidationError> {
    let budget = fetcher.map(Fetcher::budget);
    let fetch = async |image| match (image, fetcher.zip(budget.as_ref())) {
        (GivenImage::File(image), _) => Ok(image),
        (GivenImage::At { path, url }, Some((fetcher, budget))) => match fetcher.fetch(&url, budget).await {
            Ok(file) if file.is_empty() => {
                Err(ValidationError::Item { path, problem: "the image is empty".to_owned() })
            }
            Ok(file) => Ok(Image::new(file)),
            Err(error) => Err(ValidationError::Item { path, problem: error.to_string() }),
        },
        (GivenImage::At { path, .. }, None) => Err(ValidationError::Item { path, problem: UNFETCHED.to_owned() }),
    };
    let first_url = images.iter().find_map(|image| match image {
        GivenImage::At { path, .. } => Some(path.clone()),
        GivenImage::File(_) => None,
    });
    let fetched = stream::iter(images.into_iter().map(fetch)).buffered(MAX_FETCHES).try_collect();
    timeout(PROMPT_TIMEOUT, fetched).await.unwrap_or_else(|_| {
        let problem = format!("the prompt's images were not fetched within {} s", PROMPT_TIMEOUT.as_secs());
        Err(ValidationError::Item { path: first_url.unwrap_or_default(), problem })
    })
}

/// For all images that a prompt names by URL.
const PROMPT_TIMEOUT: Duration = Duration::from_secs(60);
const UNFETCHED: &str = "this server does not fetch images from URLs; its --allow-image-urls would";

fn read_one(source: &ImageSource, fetches: bool) -> Result<GivenImage, ValidationError> {
    let fail = |problem: String| ValidationError::Item { path: source.path.clone(), problem };
    let Some(rest) = source.url.strip_prefix("data:") else {
        let shown = shown(&source.url);
        let forms = "an image must be a data URI, as in data:image/png;base64,iVBOR…";
        if !fetches {
            return Err(fail(format!("{forms}: {UNFETCHED}. Given: {shown:?}")));
        }
        let url = Url::parse(&source.url)
            .map_err(|reason| fail(format!("{forms}, or an http or https URL: {reason}. Given: {shown:?}")))?;
        return Ok(GivenImage::At { path: source.path.clone(), url });
    };
    let Some((head, data)) = rest.split_once(',') else {
        return Err(fail("the data URI has no comma between its type and its data".to_owned()));
    };
    if !head.ends_with(";base64") {
        return Err(fail(format!(
            "the data of a data URI must be base64, as in data:image/png;base64,… Given: {:?}",
            shown(&source.url)
        )));
    }
    let data =
        BASE64_STANDARD.decode(data.trim_ascii()).map_err(|error| fail(format!("the data is not base64: {error}")))?;
    if data.is_empty() {
        return Err(fail("the image is empty".to_owned()));
    }
    Ok(GivenImage::File(Image::new(data)))
}

fn shown(url: &str) -> String {
    url.chars().take(MAX_SHOWN).collect()
}

/// Replaces each placeholder by the tokens of its image.
pub(super) fn expand(
    token_ids: &[u32],
    input: &ImageInput,
    images: Vec<Image>,
    encoded: &[EncodedImage],
) -> (Vec<u32>, Arc<[ImageSpan]>) {
    let (mut expanded, mut spans) = (Vec::with_capacity(token_ids.len()), Vec::with_capacity(images.len()));
    let mut next = images.into_iter().zip(encoded);
    for &token_id in token_ids {
        if token_id == input.placeholder_id
            && let Some((image, EncodedImage { token_ids, num_bytes })) = next.next()
        {
            let (offset, num_tokens) = (expanded.len() as u32, token_ids.len() as u32);
            spans.push(ImageSpan { image, offset, num_tokens, is_whole: input.is_whole, num_bytes: *num_bytes });
            expanded.extend_from_slice(token_ids);
        } else {
            expanded.push(token_id);
        }
    }
    (expanded, spans.into())
}

/// The same for tokens with their places in the text: each token of an image has the place of its placeholder.
pub(super) fn expand_spans(spans: Vec<TokenSpan>, input: &ImageInput, encoded: Vec<EncodedImage>) -> Vec<TokenSpan> {
    let mut next = encoded.into_iter().map(|image| image.token_ids);
    let expand = |span: TokenSpan| {
        let image = (span.id == input.placeholder_id).then(|| next.next()).flatten();
        image.unwrap_or_else(|| vec![span.id]).into_iter().map(move |id| TokenSpan { id, ..span })
    };
    spans.into_iter().flat_map(expand).collect()
}

/// Fails unless the prompt has one place for each image.
pub(super) fn check_places(
    token_ids: &[u32],
    input: Option<&ImageInput>,
    num_images: usize,
) -> Result<(), ValidationError> {
    let is_place = |token_id: &&u32| input.is_some_and(|input| **token_id == input.placeholder_id);
    let num_places = token_ids.iter().filter(is_place).count();
    if num_places == num_images { Ok(()) } else { Err(ValidationError::ImagePlaces { num_places, num_images }) }
}

/// Fails unless the workers have room for all images of the prompt at once.
pub(super) fn check_room(spans: &[ImageSpan], input: &ImageInput) -> Result<(), ValidationError> {
    let groups = image_groups(spans, &BuildHasherDefault::<DefaultHasher>::default());
    let (num_bytes, max_image_bytes) = (groups.iter().map(|group| group.num_bytes).sum(), input.max_bytes);
    let too_large = || ValidationError::Image(SubmitError::ImagesTooLarge { num_bytes, max_image_bytes }.to_string());
    if num_bytes <= max_image_bytes { Ok(()) } else { Err(too_large()) }
}

/// The text of a rendered chat template, with the model's placeholder for each image.
pub(super) fn place_in_template(text: Arc<str>, input: &ImageInput) -> Arc<str> {
    match input.template_text.as_str() {
        "" => text,
        template_text => text.replace(template_text, &input.placeholder).into(),
    }
}

/// The text of a prompt without a chat template, in the form that the model was trained with. `None`: as it is.
pub(super) fn framed(text: &str, input: &ImageInput) -> Option<Arc<str>> {
    let ImageInput { text_prefix, text_suffix, .. } = input;
    let (images, last, text) = match text.rfind(&*input.placeholder) {
        _ if text_prefix.is_empty() && text_suffix.is_empty() => return None,
        Some(place) => (&text[..place], &*input.placeholder, &text[place + input.placeholder.len()..]),
        None => ("", "", text),
    };
    Some([images, last, text_prefix, text, text_suffix].concat().into())
}

/// COMPAT: TGI's images in a text, `![](URL)`. Returns the text with `placeholder` in their places.
pub(crate) fn take_from_text(text: &str, placeholder: &str) -> (String, Vec<ImageSource>) {
    let (mut without, mut sources, mut rest) = (String::with_capacity(text.len()), Vec::new(), text);
    while let Some((before, after)) = rest.split_once("![](")
        && let Some((url, after)) = after.split_once(')')
    {
        without.push_str(before);
        without.push_str(placeholder);
        sources.push(ImageSource { path: format!("`inputs`, image {}", sources.len() + 1), url: url.into() });
        rest = after;
    }
    without.push_str(rest);
    (without, sources)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(template_text: &str) -> ImageInput {
        let placeholder = "\n\n<image>\n\n".to_owned();
        ImageInput {
            placeholder_id: 9,
            placeholder,
            template_text: template_text.to_owned(),
            is_whole: true,
            is_prompt_whole: false,
            text_prefix: String::new(),
            text_suffix: String::new(),
            max_bytes: 100,
            has_adapter: false,
        }
    }

    fn refusal(url: &str) -> String {
        let source = ImageSource { path: "messages[0].content[1]".to_owned(), url: url.into() };
        read(&[source], false).unwrap_err().to_string()
    }

    #[test]
    fn a_data_uri_is_a_file() {
        for url in
            ["data:image/png;base64,aGVsbG8=", "data:;base64,aGVsbG8=", "data:image/png;charset=x;base64, aGVsbG8=\n"]
        {
            let source = ImageSource { path: String::new(), url: url.into() };
            let [GivenImage::File(image)] = &read(&[source], false).unwrap()[..] else { panic!("{url}") };
            assert_eq!(image.data(), b"hello", "{url}");
        }
    }

    #[test]
    fn what_is_no_data_uri_is_refused_with_its_place() {
        for (url, problem) in [
            ("https://example.org/a.png", "its --allow-image-urls would. Given: \"https://example.org/a.png\""),
            ("", "must be a data URI"),
            ("data:image/png;base64", "no comma"),
            ("data:image/svg+xml,<svg/>", "must be base64"),
            ("data:image/png;base64,a*b=", "is not base64"),
            ("data:image/png;base64,", "is empty"),
        ] {
            let message = refusal(url);
            assert!(message.starts_with("messages[0].content[1]: ") && message.contains(problem), "{message}");
        }
        for long in ["x".repeat(1_000_000), format!("data:{},", "x".repeat(1_000_000))] {
            assert!(refusal(&long).len() < 300);
        }
    }

    #[test]
    fn a_url_is_parsed_where_the_server_fetches_images() {
        let source = |url: &str| ImageSource { path: "image".to_owned(), url: url.into() };
        let given = read(&[source("https://example.org/a.png"), source("data:;base64,aGVsbG8=")], true).unwrap();
        assert!(matches!(&given[..], [GivenImage::At { .. }, GivenImage::File(_)]));
        for url in ["ftp://example.org/a.png", "http://user@example.org/", "a.png", ""] {
            let message = read(&[source(url)], true).unwrap_err().to_string();
            assert!(
                message.starts_with("image: an image must be a data URI")
                    && message.contains("or an http or https URL: ")
            );
        }
    }

    #[test]
    fn the_number_of_images_is_bounded() {
        let source = |index| ImageSource { path: format!("image {index}"), url: "data:;base64,aGVsbG8=".into() };
        assert_eq!(read(&(0..64).map(source).collect::<Vec<_>>(), false).unwrap().len(), 64);
        let message = read(&(0..65).map(source).collect::<Vec<_>>(), false).unwrap_err().to_string();
        assert_eq!(message, "image 64: a prompt can have at most 64 images, this one has 65");
    }

    fn encoded(token_ids: &[u32]) -> EncodedImage {
        EncodedImage { token_ids: token_ids.to_vec(), num_bytes: 1 }
    }

    #[test]
    fn the_tokens_of_an_image_take_the_place_of_its_placeholder() {
        let images: Vec<_> = [b"a", b"b"].into_iter().map(|data| Image::new(data.to_vec())).collect();
        let input = input("");
        let (tokens, spans) = expand(&[1, 9, 2, 9], &input, images.clone(), &[encoded(&[9, 9, 9]), encoded(&[5, 9])]);
        assert_eq!(tokens, [1, 9, 9, 9, 2, 5, 9]);
        let spans: Vec<_> = spans.iter().map(|span| (span.tokens(), span.is_whole, span.image.clone())).collect();
        assert_eq!(spans, [(1..4, true, images[0].clone()), (5..7, true, images[1].clone())]);
    }

    #[test]
    fn the_placeholder_replaces_what_templates_write_for_an_image() {
        assert_eq!(&*place_in_template("user\n<image>a".into(), &input("")), "user\n<image>a");
        assert_eq!(&*place_in_template("user\n<image>a".into(), &input("<image>")), "user\n\n\n<image>\n\na");
    }

    #[test]
    fn the_text_after_the_last_image_is_framed() {
        assert_eq!(framed("a<image>b", &input("")), None);
        let (placeholder, text_prefix, text_suffix) = ("<image>".into(), "<bos>".into(), "\n".into());
        let input = ImageInput { placeholder, text_prefix, text_suffix, ..input("") };
        for (text, expected) in [
            ("<image><image>caption", "<image><image><bos>caption\n"),
            ("one <image>", "one <image><bos>\n"),
            ("caption", "<bos>caption\n"),
        ] {
            assert_eq!(framed(text, &input).as_deref(), Some(expected));
        }
    }

    #[test]
    fn the_tokens_of_an_image_are_where_its_placeholder_is() {
        let span = |id, start, stop| TokenSpan { id, start, stop };
        let expanded =
            expand_spans(vec![span(1, 0, 2), span(9, 2, 5), span(9, 5, 8)], &input(""), vec![encoded(&[7, 9])]);
        let expected = [span(1, 0, 2), span(7, 2, 5), span(9, 2, 5), span(9, 5, 8)];
        assert_eq!(expanded, expected);
    }

    #[test]
    fn places_and_images_must_be_as_many() {
        assert!(check_places(&[1, 9, 2, 9], Some(&input("")), 2).is_ok());
        let message = check_places(&[1, 9, 2, 9], Some(&input("")), 1).unwrap_err().to_string();
        assert_eq!(message, "the prompt has 2 places for images, but 1 images were given");
    }

    #[test]
    fn images_of_tgi_are_taken_out_of_their_text() {
        let (text, sources) = take_from_text("![](data:a)What is ![](b)? ![alt](c) ![](d", "<image>");
        assert_eq!(text, "<image>What is <image>? ![alt](c) ![](d");
        let urls: Vec<_> = sources.iter().map(|source| (source.path.as_str(), &*source.url)).collect();
        assert_eq!(urls, [("`inputs`, image 1", "data:a"), ("`inputs`, image 2", "b")]);
    }
}
