// What the drafts of an answer say of its tokens and of the drafter.

import { type Draft } from "./conversation.ts";

/** The place of each accepted draft token in its draft, from 1, by the token's position. */
export function placesInDrafts(drafts: Draft[]): Map<number, number> {
  const placesOf = ({ first, accepted }: Draft) => Array.from({ length: accepted }, (_, place): [number, number] => [first + place, place + 1]);
  return new Map(drafts.flatMap(placesOf));
}

/** For each place in a draft, from 1: how many draft tokens were verified there, and how many of them were right. */
export function acceptance(drafts: Draft[]): { verified: number; accepted: number }[] {
  const longest = Math.max(0, ...drafts.map(({ verified }) => verified));
  return Array.from({ length: longest }, (_, place) => ({
    verified: drafts.filter(({ verified }) => verified > place).length,
    accepted: drafts.filter(({ accepted }) => accepted > place).length,
  }));
}
